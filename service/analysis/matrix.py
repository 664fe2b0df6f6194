"""A base spec and the fields that vary over it, as one spec for each combination. Pure."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.errors import InvalidInput

MAX_RUNS: Final = 1000


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: what varies, and the spec that comes of it, not yet validated."""

    values: dict[str, Any]
    """By dotted field, in the matrix's order."""
    spec: dict[str, Any]


def expand(base: Mapping[str, Any], matrix: Mapping[str, Sequence[Any]], *, name: str) -> list[Cell]:
    """Return one cell for each combination, the last field varying fastest, each named by what varies.

    Raises:
        InvalidInput: no values for a field, a value that is listed twice, a field inside something that is no
            object, or more than MAX_RUNS combinations.
    """
    count = 1
    for field, values in matrix.items():
        if not isinstance(values, list | tuple) or not values:
            raise InvalidInput(
                f"{field} has no values", field=f"matrix.{field}", value=values, remedy="list at least one value"
            )
        count *= len(values)
        if count > MAX_RUNS:
            raise InvalidInput(
                f"the matrix has more than {MAX_RUNS} combinations", field="matrix", value=count,
                remedy="split the experiment",
            )  # fmt: skip
        if any(value in values[:place] for place, value in enumerate(values)):
            raise InvalidInput(
                f"{field} lists a value twice", field=f"matrix.{field}", value=list(values),
                remedy="list each value once",
            )  # fmt: skip
    return [_cell(base, dict(zip(matrix, chosen, strict=True)), name) for chosen in itertools.product(*matrix.values())]


def _cell(base: Mapping[str, Any], values: dict[str, Any], name: str) -> Cell:
    spec: dict[str, Any] = copy.deepcopy(dict(base))
    for field, value in values.items():
        _set(spec, field, copy.deepcopy(value))
    if "name" not in values:
        label = " ".join(f"{field.rpartition('.')[2]}={_word(value)}" for field, value in values.items())
        spec["name"] = f"{name} {label}".strip()[:200]
    return Cell(values, spec)


def _set(spec: dict[str, Any], field: str, value: Any) -> None:
    *path, last = field.split(".")
    place = spec
    for part in path:
        inner = place.setdefault(part, {})
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            raise InvalidInput(
                f"{part} is not an object, so {field} cannot be set", field=f"matrix.{field}", value=inner,
                remedy="name a field of the run spec, with dots between",
            )  # fmt: skip
        place = inner
    place[last] = value


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("name", "…"))
    return str(value)
