"""Reading spec files: YAML or JSON into the plain dictionaries that the service judges."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from muonscope.errors import InvalidRequest, SpecFileError

MAX_SPEC_BYTES: Final = 4 * 1024 * 1024
_SCHEMA_KEY: Final = "$schema"
_EXPERIMENT_KEYS: Final = ("name", "base", "matrix")


def read_spec(path: str, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Read a RunSpec's JSON or YAML; `-` reads standard input.

    A `ds_config` that is DeepSpeed's own, or the name of a file that holds it, is translated: what the spec says
    itself goes before it, and `tell` hears what became of each key.

    Only the file's own faults are found here. Whether it is a good spec is for the service to say: one judge.

    Raises:
        SpecFileError: unreadable, not YAML or JSON, a key given twice, not a mapping, or a DeepSpeed configuration that
            DeepSpeed would refuse.
    """
    spec = _with_ds_config(_read_mapping(path, "name: first-run"), path, tell)
    for line in _without_effect(spec):
        tell(line)
    return spec


def _without_effect(spec: dict[str, Any]) -> list[str]:
    """Name what a spec says and no rank looks at: taken, for a matrix's base may hold it for some of its runs."""
    said = spec.get("loss_scale")
    if not isinstance(said, dict) or not said:
        return []
    if spec.get("precision") in ("bf16", "fp32"):
        return [f"note: loss_scale has no effect: precision {spec['precision']} has none"]
    ignored = [name for name in said if name != "static"] if said.get("static") is not None else []
    return [f"note: loss_scale.{name} has no effect beside loss_scale.static" for name in ignored]


def refuse_invalid(spec: dict[str, Any]) -> None:
    """Refuse what no service takes, as one would: before one is started for the spec alone.

    Raises:
        InvalidRequest: an unknown field, a value out of its bounds, or settings that do not go together.
    """
    from pydantic import ValidationError

    from muonscope.contract.run_spec import RunSpec

    try:
        RunSpec.model_validate(spec)
    except ValidationError as error:
        # FastAPI takes a second to import: only where there is something to say.
        from service.api.problems import validation_problem

        refused = validation_problem(error.errors(), spec)
        raise InvalidRequest(refused.status, refused.title, refused.detail, problem=dict(refused.problem())) from error


def read_experiment(path: str, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Read an experiment of one's own: its `name`, the `base` that all its runs share, and a `matrix` of values.

    Of `base` all holds that `read_spec` says of a spec.

    Raises:
        SpecFileError: as `read_spec`; or a key is missing or unknown, or `base` or `matrix` is not a mapping.
    """
    given = _read_mapping(path, "name: my question")
    if unknown := [repr(key) for key in given if key not in _EXPERIMENT_KEYS]:
        raise SpecFileError(
            path, f"holds {', '.join(unknown)}, which an experiment does not have",
            remedy="its keys are name, base and matrix; what every run shares goes under base",
        )  # fmt: skip
    if not given.get("matrix"):
        raise SpecFileError(
            path, "has no matrix, and so one run at most",
            remedy="list values by field, such as `matrix: {step_ordering: [master, ordered]}`; "
            "a single run's spec goes to `muonscope run`",
        )  # fmt: skip
    if not given.get("name"):
        raise SpecFileError(path, "has no name", remedy="begin with `name: my question`")
    base, matrix = given.get("base") or {}, given["matrix"]
    if not isinstance(base, dict):
        raise SpecFileError(path, "has a base that is not a mapping", remedy="put a run spec's fields under it")
    if not isinstance(matrix, dict) or not all(isinstance(values, list) for values in matrix.values()):
        raise SpecFileError(
            path, "has a matrix that does not list values by field",
            remedy="write `matrix: {zero_stage: [1, 2]}`, a list for one value too",
        )  # fmt: skip
    return {"name": str(given["name"]), "base": _with_ds_config(base, path, tell), "matrix": matrix}


def names_a_file(word: str) -> bool:
    """Whether a word is a spec file's path and not a name that the service knows."""
    return word == "-" or Path(word).suffix in (".yaml", ".yml", ".json") or "/" in word


def _read_mapping(path: str, beginning: str) -> dict[str, Any]:
    text = _read_text(path)
    try:
        value = _parse_json(text) if path.endswith(".json") else _parse_yaml(text)
    except ValueError as error:
        raise SpecFileError(
            path, str(error), remedy="correct the file; docs/guides/run-spec.md has examples"
        ) from error
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds a {type(value).__name__}, not a mapping"
        raise SpecFileError(path, found, remedy=f"begin with `{beginning}`")
    return {str(key): item for key, item in value.items() if key != _SCHEMA_KEY}


def _with_ds_config(spec: dict[str, Any], path: str, tell: Callable[[str], None]) -> dict[str, Any]:
    from muonscope.contract.ds_config import RELEASE
    from muonscope.contract.ds_translation import contradiction, is_deepspeeds_own, translate

    config, file = spec.get("ds_config"), path
    if isinstance(config, str):
        file = str(Path() / config if path == "-" else Path(path).parent / config)
        try:
            config = _parse_json(_read_text(file))
        except ValueError as error:
            raise SpecFileError(file, f"is not JSON: {error}", remedy="give DeepSpeed's own file") from error
    if not isinstance(config, dict) or not is_deepspeeds_own(config):
        return spec if config is spec.get("ds_config") else {**spec, "ds_config": config}
    named = spec.get("deepspeed")
    release = str(named.get("version")) if isinstance(named, dict) else RELEASE
    said = {key: value for key, value in spec.items() if key != "ds_config"}
    if (reason := contradiction(config, said, release=release)) is not None:
        raise SpecFileError(file, reason, remedy="correct it; DeepSpeed would not take it as it is meant either")
    translation = translate(config, said)
    for line in translation.report:
        tell(f"ds_config.{line}")
    for key in sorted(said.keys() & translation.spec.keys()):
        tell(f"{key}: as the spec says itself")
    return _over(translation.spec, said)


def _over(base: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Lay what is said upon a base, dictionaries key by key."""
    result = dict(base)
    for key, value in said.items():
        held = result.get(key)
        result[key] = _over(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return result


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
