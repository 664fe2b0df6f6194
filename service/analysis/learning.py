"""Which of two runs learned better, by the losses that they recorded. Pure."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from muonscope.contract.telemetry import encode_number
from service.columns import StepColumns

_SHARE_OF_LAST: Final = 0.1


def learned(columns: StepColumns) -> dict[str, Any]:
    """Sum up one run's losses: the last, and of applied steps the lowest with its step and the mean over the last."""
    losses = columns.values["loss"]
    measured, finite = columns.measured["loss"], np.isfinite(losses)
    at = np.flatnonzero(measured)
    applied = np.flatnonzero(measured & ~columns.discarded)
    # A discarded step's loss may be low by what is not finite any more, and nothing was learned from it.
    finite = finite & measured & ~columns.discarded
    lowest = np.flatnonzero(finite)[np.argmin(losses[finite])] if finite.any() else None
    last = applied[-max(1, round(len(applied) * _SHARE_OF_LAST)) :]
    # Of infinities, or of what adds up to one, the mean is what arithmetic makes of it, and no warning.
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(losses[last].mean()) if len(last) else None
    return {
        "last": encode_number(float(losses[at[-1]])) if len(at) else None,
        "lowest": None if lowest is None else float(losses[lowest]),
        "lowest_step": None if lowest is None else int(columns.step[lowest]),
        "mean_of_last": encode_number(mean),
        "mean_of_last_steps": len(last),
    }


def lower_to_the_end(a: StepColumns, b: StepColumns) -> dict[str, Any] | None:
    """Find from which step on one run's loss is lower than the other's on every step that both recorded.

    Returns:
        The `side`, its first such step as `from_step` and the last that both recorded as `until_step`; None where the
        last losses are equal. A loss that is not finite is above any that is.
    """
    common, rows_a, rows_b = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    both = a.measured["loss"][rows_a] & b.measured["loss"][rows_b]
    steps, one, other = common[both], a.values["loss"][rows_a][both], b.values["loss"][rows_b][both]
    one, other = (np.where(np.isfinite(losses), losses, np.inf) for losses in (one, other))
    signs = (one > other).astype(np.int8) - (one < other)
    if not len(signs) or not signs[-1]:
        return None
    others = np.flatnonzero(signs != signs[-1])
    first = others[-1] + 1 if len(others) else 0
    side = "b" if signs[-1] > 0 else "a"
    return {"side": side, "from_step": int(steps[first]), "until_step": int(steps[-1])}


def caveat(a: Mapping[str, Any], b: Mapping[str, Any], is_same_data: bool | None) -> str | None:
    """Say why one loss cannot simply be held against the other, by the specs and what is known of the data."""
    tasks = [(spec.get("task") or {}).get("name") for spec in (a, b)]
    if tasks[0] != tasks[1]:
        return "The tasks differ, and a lower loss on one says nothing of the other."
    if is_same_data is False:
        return "The data differ, and a lower loss may be theirs."
    if is_same_data is None:
        return "Whether both trained on the same data was not recorded."
    return None
