"""Whether a run's raw `ds_config` says what DeepSpeed will hear.

DeepSpeed ignores a top-level key that it does not know, so a misspelt one does nothing and says nothing: here it is
refused. Inside its sections it refuses unknown keys and wrong types itself, but only once the workers run: here that
is said at submission. `auto`, which a section takes as "the default", is an error elsewhere.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from muonscope.contract.deepspeed_keys import RELEASE, SECTIONS, TOP_LEVEL

__all__ = ["RELEASE", "refusal"]

AUTO: Final = "auto"
TRUE_WORDS: Final = frozenset({"true", "yes", "on", "t", "y", "1"})
_BOOLEAN_WORDS: Final = frozenset(
    {"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0"}  # pydantic's, which DeepSpeed uses
)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Say what of a `ds_config` DeepSpeed would ignore or refuse, and the remedy; None where it takes all of it."""
    for key, value in config.items():
        if key not in TOP_LEVEL:
            return (
                f"ds_config.{key} is no key of DeepSpeed {RELEASE}'s, which would ignore it; "
                f"{_suggestion(key, TOP_LEVEL)}"
            )
        if value == AUTO:
            return f"ds_config.{key}={AUTO!r} means nothing to DeepSpeed itself; give a value or leave it out"
    for name, fields in SECTIONS.items():
        section = _at(config, name)
        if isinstance(section, Mapping) and (reason := _section_refusal(name, section, fields)) is not None:
            return reason
    return None


def _section_refusal(name: str, section: Mapping[str, Any], fields: Mapping[str, str]) -> str | None:
    for key, value in section.items():
        where = f"ds_config.{name}.{key}"
        if key not in fields:
            return f"{where} is no key of DeepSpeed {RELEASE}'s; {_suggestion(key, fields)}"
        # DeepSpeed's sections take it as "the default".
        if value == AUTO or value is None:
            continue
        wanted = _wrong_kind(fields[key], value)
        if wanted is not None:
            return f"{where}={value!r} is not {wanted}; give one, or leave it out for DeepSpeed's default"
    return None


def _wrong_kind(kind: str, value: Any) -> str | None:
    """Say what DeepSpeed wants instead of a value, as its pydantic models convert; None where it takes the value."""
    if kind == "bool":
        takes = isinstance(value, bool) or value in (0, 1)
        takes = takes or (isinstance(value, str) and value.strip().lower() in _BOOLEAN_WORDS)
        return None if takes else "true or false"
    if kind == "str":
        return None if isinstance(value, str) else "text"
    number, _, bound = kind.partition(" ")
    if number == "int" and not _is_whole(value):
        return "a whole number"
    if number == "float" and not _is_number(value):
        return "a number"
    return None if number == "any" or _is_within(float(value), bound) else f"a number {bound}"


def _is_within(value: float, bound: str) -> bool:
    sign, _, least = bound.partition(" ")
    return not sign or value > float(least) or (sign == ">=" and value == float(least))


def _is_whole(value: Any) -> bool:
    if isinstance(value, str):
        digits = value.strip().removeprefix("-").removeprefix("+")
        return digits.replace("_", "").isdecimal() or (digits.endswith(".0") and digits.removesuffix(".0").isdecimal())
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float)


def _suggestion(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}? Else remove it" if close else "remove it"


def _at(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
