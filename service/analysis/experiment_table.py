"""An experiment's answer as a table, one row a run, as cells, Markdown and CSV; published figures beside it. Pure."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muonscope.contract.published import Published, check_label, published_result
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import RunStatus, Verdict
from muonscope.contract.telemetry import encode_number

Cell = str | float | int | bool | None

LABELS: Final = {
    "zero_stage": "stage",
    "initial_scale": "initial scale",
    "loss_scale.initial_power": "initial scale",
    "step_ordering": "ordering",
}
RESULT_COLUMNS: Final = ("moved", "momentum finite", "outcome", "overflows", "final scale", "largest weight motion")
# What the published tables vary, in their order.
STANDARD_FIELDS: Final = ("zero_stage", "loss_scale.initial_power", "step_ordering")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a row is made of: a run and what its record shows so far."""

    run_id: str
    spec: Mapping[str, Any]
    status: RunStatus
    verdict: Verdict | None
    verdict_step: int | None
    steps: int
    overflows: int
    final_loss_scale: float | None
    parameters_moved: int | None
    parameters_total: int | None
    momentum_finite: bool | None
    max_weight_motion: float | None


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a finished run shows what is published of it, and what differs."""

    passed: bool
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    columns: list[str]
    rows: list[list[Cell]]
    run_ids: list[str]
    checks: list[Check | None]
    """By row; None where nothing is known of the run or it has not ended."""
    check_label: str = "published"
    """What the checks hold the runs against: figures that are published, or what is expected."""

    def as_json(self) -> dict[str, Any]:
        return {
            "columns": self.columns,
            "rows": [[_json_cell(cell) for cell in row] for row in self.rows],
            "run_ids": self.run_ids,
            "check_label": self.check_label,
            "published": [
                None if check is None else {"matches": check.passed, "differences": list(check.differences)}
                for check in self.checks
            ],
        }

    def _with_checks(self) -> tuple[list[str], list[list[Cell]]]:
        if not any(self.checks):
            return self.columns, self.rows
        marked = [[*row, _mark(check)] for row, check in zip(self.rows, self.checks, strict=True)]
        return [*self.columns, self.check_label], marked

    def as_markdown(self) -> str:
        """Render a Markdown table; text that would break a cell or start markup is escaped."""
        columns, rows = self._with_checks()
        lines = [_markdown_line(columns), "|" + "---|" * len(columns)]
        lines.extend(_markdown_line([display(cell) for cell in row]) for row in rows)
        return "\n".join(lines) + "\n"

    def as_csv(self) -> str:
        """Render CSV: nan, inf and -inf as such, empty where not measured; no cell is a spreadsheet formula."""
        columns, rows = self._with_checks()
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\r\n")
        writer.writerow(["run", *columns])
        writer.writerows(
            [run_id, *(_csv_cell(cell) for cell in row)] for run_id, row in zip(self.run_ids, rows, strict=True)
        )
        return out.getvalue()


def build_table(
    results: Sequence[RunResult],
    fields: Sequence[str] = STANDARD_FIELDS,
    *,
    builtin: str | None = None,
    extra: Mapping[str, Sequence[Cell]] | None = None,
) -> Table:
    """Make the table of an experiment.

    Args:
        results: its runs, in order.
        fields: the dotted spec fields that vary.
        builtin: the built-in experiment's name, for what is published of it.
        extra: further columns by label, one cell a run.
    """
    further = extra or {}
    columns = [LABELS.get(field, field) for field in fields] + list(RESULT_COLUMNS) + list(further)
    rows = [
        [*(_field(result.spec, field) for field in fields), *_result_cells(result),
         *(cells[place] for cells in further.values())]
        for place, result in enumerate(results)
    ]  # fmt: skip
    checks = [check_published(builtin, result) for result in results]
    return Table(columns, rows, [result.run_id for result in results], checks, check_label(builtin))


def _field(spec: Mapping[str, Any], field: str) -> Cell:
    value: Any = spec
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if field == "loss_scale.initial_power" and isinstance(value, int):
        return 1 << value
    cell: Cell = value if value is None or isinstance(value, str | int | float) else str(value)
    return cell


def _result_cells(result: RunResult) -> list[Cell]:
    moved = None
    if result.parameters_moved is not None and result.parameters_total is not None:
        moved = f"{result.parameters_moved}/{result.parameters_total}"
    scale = result.final_loss_scale
    return [
        moved,
        result.momentum_finite,
        outcome(result),
        result.overflows,
        int(scale) if scale is not None and scale.is_integer() else scale,
        result.max_weight_motion,
    ]


def outcome(result: RunResult) -> str:
    """Say in a few words what came of a run: its verdict, with the step where one belongs to it, or its status."""
    if result.verdict is None or not result.status.is_terminal:
        return f"{result.status}, {result.steps} steps" if result.status is RunStatus.RUNNING else str(result.status)
    if result.verdict_step is not None:
        return f"{result.verdict} at step {result.verdict_step}"
    return str(result.verdict)


def check_published(builtin: str | None, result: RunResult) -> Check | None:
    """Hold a finished run against what is published of it."""
    if builtin is None or not result.status.is_terminal:
        return None
    published = published_result(builtin, RunSpec.model_validate(result.spec))
    if published is None:
        return None
    differences = tuple(_differences(published, result, check_label(builtin)))
    return Check(not differences, differences)


def _differences(published: Published, result: RunResult, label: str) -> list[str]:
    pairs = (
        ("verdict", published.verdict, result.verdict),
        ("verdict step", published.verdict_step, result.verdict_step),
        ("parameters moved", published.parameters_moved, result.parameters_moved),
        ("parameters", published.parameters_total, result.parameters_total),
        ("momentum finite", published.momentum_finite, result.momentum_finite),
        ("overflows", published.overflows, result.overflows),
        ("final scale", published.final_loss_scale, result.final_loss_scale),
    )
    found = [
        f"{name} is {display(actual)}, {label} {display(expected)}"
        for name, expected, actual in pairs
        if expected is not None and expected != actual
    ]
    least, most, motion = published.least_weight_motion, published.most_weight_motion, result.max_weight_motion
    is_bounded = least > 0 or most is not None
    if is_bounded and (motion is None or not least <= motion <= (math.inf if most is None else most)):
        found.append(f"largest weight motion is {display(motion)}, {label} {least:g} to {display(most) or 'any'}")
    return found


def display(cell: Cell) -> str:
    """Return a cell as people read it: six digits at most, yes and no, nothing where not measured."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return str(cell)


def _mark(check: Check | None) -> str | None:
    if check is None:
        return None
    return "pass" if check.passed else "fail: " + "; ".join(check.differences)


def _json_cell(cell: Cell) -> Cell:
    return encode_number(cell) if isinstance(cell, float) else cell


def _csv_cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, str):
        return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
    return repr(cell)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    for character in "\\|`*<>[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
