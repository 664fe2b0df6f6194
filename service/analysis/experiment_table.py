"""An experiment's answer as a table, one row a run, as cells, Markdown and CSV; published figures beside it. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muonscope.contract.published import PUBLISHED_TABLES, check_label
from muonscope.contract.status import RunStatus, Verdict
from muonscope.contract.telemetry import encode_number
from service.analysis.figures import Figure, RunResult, checked, display, figure

Cell = str | float | int | bool | None

LABELS: Final = {
    "zero_stage": "stage",
    "initial_scale": "initial scale",
    "loss_scale.initial_power": "initial scale",
    "step_ordering": "ordering",
}
RESULT_COLUMNS: Final = ("moved", "momentum finite", "outcome", "overflows", "final scale", "largest weight motion")
# What the thirty-step table varies, in its order.
STANDARD_FIELDS: Final = ("zero_stage", "loss_scale.initial_power", "step_ordering")


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
    checked: str = ""
    """What of a run they hold against them."""

    def as_json(self) -> dict[str, Any]:
        return {
            "columns": self.columns,
            "rows": [[_json_cell(cell) for cell in row] for row in self.rows],
            "run_ids": self.run_ids,
            "check_label": self.check_label,
            "checked": self.checked,
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
    """Make the table of an experiment; a built-in one's has each run's figure beside the known one.

    Args:
        results: its runs, in order.
        fields: the dotted spec fields that vary.
        builtin: the built-in experiment's name, for what is published of it.
        extra: further columns by label, one cell a run.
    """
    if builtin == PUBLISHED_TABLES:
        return _published_tables(results)
    further = dict(extra or {})
    figures = [None if builtin is None else figure(builtin, result, results) for result in results]
    if any(figures):
        further |= _figure_columns(results, figures, check_label(builtin))
    columns = [LABELS.get(field, field) for field in fields] + list(RESULT_COLUMNS) + list(further)
    rows = [
        [*(_field(result.spec, field) for field in fields), *_result_cells(result),
         *(cells[place] for cells in further.values())]
        for place, result in enumerate(results)
    ]  # fmt: skip
    return Table(columns, rows, _ids(results), _checks(results, figures), check_label(builtin), checked(builtin))


def _published_tables(results: Sequence[RunResult]) -> Table:
    """One row a run of every table, each table's run by run, told apart by the tag that names it."""
    tables = [str(next(iter(result.spec.get("tags") or []), "")) for result in results]
    figures = [
        figure(table, result, [each for each, other in zip(results, tables, strict=True) if other == table])
        for table, result in zip(tables, results, strict=True)
    ]
    label = check_label(PUBLISHED_TABLES)
    shown = _figure_columns(results, figures, label)
    names = [
        str(result.spec.get("name", "")).removeprefix(table).strip()
        for table, result in zip(tables, results, strict=True)
    ]
    rows: list[list[Cell]] = [list(row) for row in zip(tables, names, *shown.values(), strict=True)]
    return Table(["table", "run", *shown], rows, _ids(results), _checks(results, figures), label)


def _figure_columns(
    results: Sequence[RunResult], figures: Sequence[Figure | None], label: str
) -> dict[str, list[Cell]]:
    pairs = list(zip(results, figures, strict=True))
    columns: dict[str, list[Cell]] = {
        "measured": [made.measured if made is not None and run.status.is_terminal else None for run, made in pairs]
    }
    if any(made is not None and made.known for _, made in pairs):
        columns[f"{label} figure"] = [made.known if made is not None else None for _, made in pairs]
    return columns


def _checks(results: Sequence[RunResult], figures: Sequence[Figure | None]) -> list[Check | None]:
    return [
        None
        if made is None or not made.known or not result.status.is_terminal
        else Check(not made.differences, made.differences)
        for result, made in zip(results, figures, strict=True)
    ]


def _ids(results: Sequence[RunResult]) -> list[str]:
    return [result.run_id for result in results]


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
    """Say in a few words what came of a run: its verdict, with the step where one belongs to it, or its status.

    Of one that failed before its record could prove anything, what failed: `failed: config_refused`.
    """
    if result.status is RunStatus.FAILED and result.verdict in (None, Verdict.INCONCLUSIVE) and result.failure:
        return f"{result.status}: {result.failure}"
    if result.verdict is None or not result.status.is_terminal:
        return f"{result.status}, {result.steps} steps" if result.status is RunStatus.RUNNING else str(result.status)
    if result.verdict_step is not None:
        return f"{result.verdict} at step {result.verdict_step}"
    return str(result.verdict)


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
