"""How an experiment's result looks, and what the shell learns from it."""

from typing import TYPE_CHECKING, Any, Final

from muonscope.cli import exit_codes
from muonscope.cli.screen import NOT_MEASURED, number

if TYPE_CHECKING:
    from muonscope.client import Experiment, PublishedCheck


# Their figures are the outcome, the moved parameters and the overflows again, in one cell.
_REPEATED: Final = {"thirty-step": ("measured", "published figure")}


def result_table(experiment: "Experiment") -> tuple[list[str], list[list[str]]]:
    """The service's table as text, with a column that says whether each row is as published.

    What another column of it shows already is left to `--json` and the dashboard.
    """
    table = experiment.table
    repeated = _REPEATED.get(experiment.builtin or "", ())
    shown = [index for index, column in enumerate(table.columns) if column not in repeated]
    columns = [table.columns[index] for index in shown]
    rows = [[_cell(row[index]) for index in shown] for row in table.rows]
    if not any(table.published):
        return columns, rows
    marked = [[*row, _mark(check)] for row, check in zip(rows, table.published, strict=True)]
    return [*columns, table.check_label], marked


def experiment_exit_code(experiment: "Experiment") -> int:
    """0 when every run shows what is published of it, or trains where nothing is; else as the runs' worst."""
    checks = dict(zip(experiment.table.run_ids, experiment.table.published, strict=True))
    codes = []
    for run in experiment.runs:
        code, check = exit_codes.exit_code(run), checks.get(run.id)
        if check is not None and code not in (exit_codes.FAILURE, exit_codes.STOPPED):
            code = exit_codes.TRAINS if check.matches else exit_codes.OTHER_VERDICT
        codes.append(code)
    return exit_codes.worst(codes)


def _mark(check: "PublishedCheck | None") -> str:
    if check is None:
        return NOT_MEASURED
    return "pass" if check.matches else "fail: " + "; ".join(check.differences)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value)
    return number(value)
