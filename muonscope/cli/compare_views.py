"""How the comparison of two runs looks: first the answer, then what supports it."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from muonscope.cli.screen import NOT_MEASURED, number

if TYPE_CHECKING:
    from muonscope.client import Comparison


def run_heads(comparison: "Comparison") -> tuple[str, str]:
    """What heads the two runs' columns: their names, and the ids that tell runs of one name apart."""
    runs = {"a": comparison.a, "b": comparison.b}
    heads = [
        f"{comparison.names[side]} ({run_id})" if side in comparison.names else run_id for side, run_id in runs.items()
    ]
    return heads[0], heads[1]


def answer_lines(comparison: "Comparison") -> list[str]:
    """Where and why the records part, in words."""
    lines = [comparison.explanation] if comparison.explanation else []
    if comparison.bit_equal_until is not None:
        lines.append(f"bit-equal until step {comparison.bit_equal_until}")
    found = comparison.first_divergence
    if found is not None:
        where = f" in {found.parameter}" if found.parameter else ""
        lines.append(
            f"first divergence: step {found.step}, {found.scalar}{where}: {number(found.a)} | {number(found.b)}"
        )
    return lines


def spec_rows(comparison: "Comparison") -> list[list[str]]:
    return [[each.field, _text(each.a), _text(each.b)] for each in comparison.spec_difference]


def figure_rows(comparison: "Comparison") -> list[list[str]]:
    """Every figure that the service gives for both runs, by its name; their order is the service's."""
    groups = {
        "discarded steps": comparison.discarded,
        "loss scale": comparison.loss_scale,
        "": comparison.final,
        "cost": comparison.cost,
    }
    return [row for name, group in groups.items() for row in _pairs(group, name)]


def _pairs(value: Mapping[str, Any], name: str) -> list[list[str]]:
    """Find what has one side for each run, however deep, and lay the sides beside each other."""
    rows: list[list[str]] = []
    if "a" in value and "b" in value:
        a, b = value["a"], value["b"]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            rows += [[f"{name}, {key}", _text(a[key]), _text(b.get(key))] for key in a if not isinstance(a[key], list)]
        else:
            rows.append([name, _text(a), _text(b)])
    for key, item in value.items():
        if isinstance(item, Mapping) and key not in ("a", "b"):
            rows += _pairs(item, ", ".join(part for part in (name, key) if part))
    return rows


def _text(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value)
    return json.dumps(value, ensure_ascii=False)
