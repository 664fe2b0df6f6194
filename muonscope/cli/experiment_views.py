"""How an experiment's result looks, with what is known of each run beside it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from muonscope.cli import exit_codes
from muonscope.cli.screen import NOT_MEASURED, number

if TYPE_CHECKING:
    from muonscope.client import Experiment, Run
    from muonscope.contract.published import Published

PUBLISHED_COLUMN: Final = "published"


def differences(published: "Published", run: "Run") -> list[str]:
    """Say in what a finished run differs from what is published of it; empty when in nothing."""
    summary, verdict = run.summary, run.verdict
    pairs: list[tuple[str, Any, Any]] = [
        ("verdict", published.verdict, verdict and verdict.name),
        ("verdict step", published.verdict_step, verdict and verdict.step),
        ("parameters moved", published.parameters_moved, summary.parameters_moved),
        ("parameters", published.parameters_total, summary.parameters_total),
        ("momentum finite", published.momentum_finite, summary.momentum_finite),
        ("overflows", published.overflows, summary.overflows),
        ("final loss scale", published.final_loss_scale, summary.final_loss_scale),
    ]
    found = [
        f"{name} {_word(actual)}, published {_word(expected)}"
        for name, expected, actual in pairs
        if expected is not None and actual != expected
    ]
    return found + _motion_difference(published, summary.max_weight_motion)


def _motion_difference(published: "Published", motion: float | None) -> list[str]:
    least, most = published.least_weight_motion, published.most_weight_motion
    if least == 0.0 and most is None:
        return []
    if motion is not None and least <= motion and (most is None or motion <= most):
        return []
    bounds = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
    return [f"largest weight motion {number(motion)}, published {bounds}"]


def checks(experiment: "Experiment") -> list[list[str] | None]:
    """One entry a run: its differences from what is published, or None where nothing is."""
    from muonscope.contract.published import published_result

    results: list[list[str] | None] = []
    for run in experiment.runs:
        published = published_result(experiment.name, run.run_spec())
        results.append(None if published is None else differences(published, run))
    return results


def experiment_exit_code(experiment: "Experiment") -> int:
    """0 when every run reached what is known of it, or trains where nothing is known; else as the runs' worst."""
    codes = []
    for run, found in zip(experiment.runs, checks(experiment), strict=True):
        code = exit_codes.exit_code(run)
        if found is None or code in (exit_codes.FAILURE, exit_codes.STOPPED):
            codes.append(code)
        else:
            codes.append(exit_codes.OTHER_VERDICT if found else exit_codes.TRAINS)
    return exit_codes.worst(codes)


def result_table(experiment: "Experiment") -> tuple[list[str], list[list[str]]]:
    """The service's table as text, with a column that says whether each row is as published."""
    columns, rows = table_text(experiment.table.columns, experiment.table.rows)
    found = checks(experiment)
    if len(found) == len(rows) and any(check is not None for check in found):
        columns = [*columns, PUBLISHED_COLUMN]
        rows = [[*row, _mark(check)] for row, check in zip(rows, found, strict=True)]
    return columns, rows


def table_text(columns: Sequence[Any], rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Turn the service's columns and rows into cells."""
    return [str(column) for column in columns], [[_cell(cell) for cell in row] for row in rows]


def _mark(check: list[str] | None) -> str:
    if check is None:
        return NOT_MEASURED
    return "no: " + "; ".join(check) if check else "yes"


def _cell(value: Any) -> str:
    if value is None or isinstance(value, int | float):
        return number(value)
    return str(value)


def _word(value: Any) -> str:
    return str(value) if isinstance(value, str) else number(value)
