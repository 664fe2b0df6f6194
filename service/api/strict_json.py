"""JSON bodies, read strictly once for every endpoint, before any framework sees them.

Refused with the place named: text that is not JSON, NaN and infinities as numbers (their strings are the contract),
numbers beyond 64 bits, a key given twice, lone surrogates, nesting beyond `MAX_DEPTH`.
"""

import json
import math
from typing import Any, Final

from service.errors import InvalidInput, MalformedRequest

MAX_DEPTH: Final = 64
# Python refuses to convert longer digit strings, and nothing here needs them.
_INTEGER_LIMIT: Final = 2**63


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def check(body: bytes) -> None:
    """Raise what is wrong with a JSON body.

    Raises:
        MalformedRequest: it is not JSON, or nested too deep, or gives a key twice.
        InvalidInput: a number or text in it that nothing could store.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRequest(
            f"the body is not UTF-8 at byte {error.start}", field="body", remedy="send JSON encoded as UTF-8"
        ) from error
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise MalformedRequest(
            "a key is given twice", field=error.key[:200], value=error.key, remedy="give each key once"
        ) from error
    except RecursionError as error:
        raise MalformedRequest(
            "the body is nested too deep", field="body", remedy=f"nest at most {MAX_DEPTH} levels"
        ) from error
    except ValueError as error:
        raise MalformedRequest(f"the body is not JSON: {error}", field="body", remedy="send valid JSON") from error
    _walk(document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return found


def _walk(document: Any) -> None:
    # A stack of its own: what is to be refused may be deeper than Python's.
    stack: list[tuple[Any, str, int]] = [(document, "", 0)]
    while stack:
        value, path, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise MalformedRequest(
                f"the body is nested more than {MAX_DEPTH} levels deep", field=path[:200] or "body",
                remedy=f"nest at most {MAX_DEPTH} levels",
            )  # fmt: skip
        if isinstance(value, dict):
            for key, item in value.items():
                _check_text(key, path or "body")
                stack.append((item, f"{path}.{key}" if path else key, depth + 1))
        elif isinstance(value, list):
            stack.extend((item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value))
        else:
            _check_scalar(value, path or "body")


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(
            f"{path} is not a finite number", field=path, value=str(value),
            remedy="give a finite number",
        )  # fmt: skip
    elif isinstance(value, int) and not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise InvalidInput(
            f"{path} does not fit in 64 bits", field=path, value=value, remedy="give a number of at most 64 bits"
        )


def _check_text(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{path} contains a lone surrogate", field=path.encode("utf-8", "replace").decode(), value=text,
            remedy="send valid Unicode",
        ) from error  # fmt: skip
