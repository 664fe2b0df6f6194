"""Reading spec files: YAML or JSON into the plain dictionary that the service judges."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from muonscope.errors import SpecFileError

MAX_SPEC_BYTES: Final = 4 * 1024 * 1024
_SCHEMA_KEY: Final = "$schema"


def read_spec(path: str) -> dict[str, Any]:
    """Read a RunSpec's JSON or YAML; `-` reads standard input.

    Only the file's own faults are found here. Whether it is a good spec is for the service to say: one judge.

    Raises:
        SpecFileError: unreadable, not YAML or JSON, a key given twice, or not a mapping.
    """
    text = _read_text(path)
    try:
        value = _parse_json(text) if path.endswith(".json") else _parse_yaml(text)
    except ValueError as error:
        raise SpecFileError(
            path, str(error), remedy="correct the file; docs/guides/run-spec.md has examples"
        ) from error
    if not isinstance(value, dict):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecFileError(path, f"holds {found}, not a mapping", remedy="begin with `name: first-run`")
    return {str(key): item for key, item in value.items() if key != _SCHEMA_KEY}


def _read_text(path: str) -> str:
    try:
        data = sys.stdin.buffer.read(MAX_SPEC_BYTES + 1) if path == "-" else _read_bytes(Path(path))
        text = data.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise SpecFileError(path, f"cannot be read: {reason}", remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise SpecFileError(path, f"is not UTF-8 text (byte {error.start})", remedy="save it as UTF-8") from error
    if len(data) > MAX_SPEC_BYTES:
        raise SpecFileError(path, f"is larger than {MAX_SPEC_BYTES} bytes", remedy="a spec is a few kilobytes")
    return text


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SPEC_BYTES + 1)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"gives {key!r} twice")
        result[key] = value
    return result


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML without its two traps: dates out of plain text, and a repeated key that silently wins."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # Before merges are resolved: a key beside `<<` may well repeat a merged one.
            _without_duplicates([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {_yaml_reason(error)}") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _yaml_reason(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{getattr(error, 'problem', None) or error}{where}"
