"""run_summary: what the run table reads of a run's record, kept current in the transaction that stores the steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from muonscope.contract.attempts import FinalState
from service.columns import FINITE, MINUS_INFINITY, NAN, PLUS_INFINITY, StepColumns
from service.store.models import Run, RunSummary

# The scalars that may be non-finite, in the order of their bits in the summary's mask.
MASKED: Final = ("final_loss_scale", "last_loss", "last_momentum_norm", "max_weight_motion")
_VALUES: Final = {NAN: math.nan, PLUS_INFINITY: math.inf, MINUS_INFINITY: -math.inf}


def get_scalar(summary: RunSummary, name: str) -> float | None:
    """Read one of MASKED as it was measured; None where it was not."""
    kind = summary.nonfinite_mask >> 2 * MASKED.index(name) & 3
    value: float | None = _VALUES[kind] if kind else getattr(summary, name)
    return value


def set_scalar(summary: RunSummary, name: str, value: float | None) -> None:
    """Store one of MASKED, its kind in the mask where it is not finite."""
    shift = 2 * MASKED.index(name)
    kind = FINITE
    if value is not None and not math.isfinite(value):
        kind = NAN if math.isnan(value) else PLUS_INFINITY if value > 0 else MINUS_INFINITY
    setattr(summary, name, None if kind else value)
    summary.nonfinite_mask = (summary.nonfinite_mask or 0) & ~(3 << shift) | kind << shift


@dataclass(frozen=True, slots=True)
class Recounted:
    """(overflow, discarded) of steps that earlier attempts recorded."""

    out: Sequence[tuple[bool, bool]] = ()
    """Of those that count no more: the new ones take their place, or the run is back before them."""
    back: Sequence[tuple[bool, bool]] = ()
    """Of those that the run has come to again, and that the newest attempt lacks."""


def add_steps(summary: RunSummary, columns: StepColumns, recounted: Recounted, *, is_late: bool = False) -> None:
    """Count new steps of the run's newest attempt.

    Args:
        summary: the run's.
        columns: rank 0's new steps, in order, none stored before by this attempt.
        recounted: what becomes of earlier attempts' steps.
        is_late: whether the attempt has stored a later step; how far an earlier attempt came does not matter.
    """
    summary.steps += len(columns) + len(recounted.back) - len(recounted.out)
    for name, flags, place in (("overflows", columns.overflow, 0), ("discarded", columns.discarded, 1)):
        change = sum(row[place] for row in recounted.back) - sum(row[place] for row in recounted.out)
        setattr(summary, name, getattr(summary, name) + int(flags.sum()) + change)
    if is_late:
        return
    summary.last_step = int(columns.step[-1])
    for name, field in (
        ("final_loss_scale", "loss_scale_after"),
        ("last_loss", "loss"),
        ("last_momentum_norm", "momentum_norm"),
    ):
        measured = np.flatnonzero(columns.measured[field])
        if len(measured):
            value = float(columns.values[field][measured[-1]])
            set_scalar(summary, name, value)
            if name == "last_momentum_norm":
                summary.momentum_finite = math.isfinite(value)


def set_final_state(run: Run, final: FinalState) -> None:
    """Keep what was measured at the end of the run's newest attempt."""
    summary = run.summary
    summary.parameters_moved = final.parameters_moved
    summary.parameters_total = final.parameters_total
    summary.muon_parameters_moved = final.muon_parameters_moved
    summary.muon_parameters_total = final.muon_parameters_total
    set_scalar(summary, "max_weight_motion", final.max_weight_motion)
