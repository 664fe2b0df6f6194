"""What a finished run's record proves: verdicts gravest first, each with the evidence that a reader can check.

    dies          the loss scale was exhausted; the step is the first that could not be recorded
    poisoned      the momentum turned non-finite
    diverged      a loss or a weight was non-finite on a step that was applied
    stalled       no parameter that Muon takes has moved
    absorbed      finite momentum moved on steps that were discarded
    inconclusive  none of the others
    trains        all steps attempted, at least one applied, every trainable parameter moved, all of it finite

Pure: arrays in, findings out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from muonscope.contract.attempts import Failure, FinalState
from muonscope.contract.numbers import apart
from muonscope.contract.status import FailureKind, Finding, RunStatus, Verdict
from service.columns import FINITE, KIND_NAMES, NAN, StepColumns, norms_matrix

SERIES: Final = ("loss_scale_before", "loss_scale_after", "loss", "momentum_norm", "nonfinite_parameters")
"""The series that `judge` reads."""
_ENDS_SMOOTHED: Final = 20


@dataclass(frozen=True, slots=True)
class Poison:
    """Where a parameter's momentum first turned non-finite."""

    step: int
    parameter: str
    kind: int


@dataclass(frozen=True, slots=True)
class Absorption:
    """The discarded steps on which finite momentum moved."""

    steps: int
    discarded: int
    first_step: int
    parameter: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that a judgement rests on."""

    columns: StepColumns
    """The series of SERIES, every step."""
    planned_steps: int
    status: RunStatus
    failure: Failure | None = None
    final: FinalState | None = None
    poison: Poison | None = None
    absorption: Absorption | None = None
    parameter_names: Sequence[str] = ()
    has_muon_optimizer: bool = True
    """Whether a Muon is there to route parameters to; a script of somebody's own may have another optimizer."""

    @property
    def steps(self) -> int:
        return len(self.columns)

    @property
    def applied(self) -> int:
        return int((~self.columns.discarded).sum())


@dataclass(frozen=True, slots=True)
class Found:
    """One thing the record proves."""

    name: Verdict | Finding
    evidence: str
    step: int | None = None
    parameter: str | None = None

    def as_json(self) -> dict[str, str | int | None]:
        return {"name": self.name.value, "step": self.step, "parameter": self.parameter, "evidence": self.evidence}


def judge(record: RunRecord) -> list[Found]:
    """Return all that the record proves: verdicts gravest first, at least one, then lesser findings."""
    checks = (_dies, _poisoned, _diverged, _stalled, _absorbed, _trains)
    verdicts = [found for check in checks if (found := check(record)) is not None]
    if not verdicts:
        verdicts = [_inconclusive(record)]
    lesser = (_no_muon(record), _loss_rose(record.columns))
    return [*verdicts, *(found for found in lesser if found is not None)]


def _dies(record: RunRecord) -> Found | None:
    if record.failure is None or record.failure.kind is not FailureKind.LOSS_SCALE_EXHAUSTED:
        return None
    if not record.steps:
        return Found(Verdict.DIES, "The loss scale was exhausted before a step was recorded.", record.failure.step)
    last = int(record.columns.step[-1])
    step = max(last + 1, record.failure.step or 0)
    parameter = record.poison.parameter if record.poison is not None else None
    if step > last + 1:
        lost = f"step {last + 1}" if step == last + 2 else f"steps {last + 1} to {step - 1}"
        evidence = f"Step {step} overflowed with the loss scale at its minimum; {lost} did not arrive."
        return Found(Verdict.DIES, evidence, step, parameter)
    kept = np.flatnonzero(~record.columns.discarded)
    in_a_row = record.steps - (int(kept[-1]) + 1 if len(kept) else 0)
    minimum = "its minimum"
    if record.columns.measured["loss_scale_after"][-1]:
        minimum += f" of {_number(record.columns.values['loss_scale_after'][-1])}"
    without_loss = in_a_row and (record.columns.kinds("loss")[-in_a_row:] == NAN).all()
    return Found(
        Verdict.DIES,
        f"Step {step} overflowed with the loss scale at {minimum}, "
        f"after {in_a_row} discarded steps in a row."
        + (" Their losses were NaN: no smaller scale would have helped." if without_loss else ""),
        step,
        parameter,
    )


def _poisoned(record: RunRecord) -> Found | None:
    columns = record.columns
    kinds = columns.kinds("momentum_norm")
    bad = np.flatnonzero(kinds != FINITE)
    poison = record.poison
    if not len(bad) and poison is None:
        return None
    step = poison.step if poison is not None else int(columns.step[bad[0]])
    kind = poison.kind if poison is not None else int(kinds[bad[0]])
    where = f"the momentum of {poison.parameter}" if poison is not None else "the momentum"
    (row,) = np.flatnonzero(columns.step == step)[:1].tolist() or [None]
    was = "a step" if row is None else "a discarded step" if columns.discarded[row] else "an applied step"
    end = _after_poison(columns, step)
    return Found(
        Verdict.POISONED,
        f"At step {step}, {was}, {where} became {KIND_NAMES[kind]}{end}.",
        step,
        poison.parameter if poison is not None else None,
    )


def _after_poison(columns: StepColumns, step: int) -> str:
    """Say what became of the norm of the whole momentum, as far as it was measured from this step on."""
    at = np.flatnonzero(columns.measured["momentum_norm"] & (columns.step >= step))
    if not len(at):
        return ""
    kinds, last = columns.kinds("momentum_norm"), int(columns.step[at[-1]])
    if not kinds.any():
        # It is the norm of what Muon trains, and the parameter is another's.
        return "; the norm of Muon's own momentum stays finite"
    if kinds[at[-1]] != FINITE:
        return f" and the norm is still {KIND_NAMES[int(kinds[at[-1]])]} at step {last}"
    return f"; the recorded norm is finite again at step {last}"


def _diverged(record: RunRecord) -> Found | None:
    columns = record.columns
    applied = ~columns.discarded
    losses = np.flatnonzero(applied & (columns.kinds("loss") != FINITE))
    weights = np.flatnonzero(applied & (np.nan_to_num(columns.values["nonfinite_parameters"]) > 0))
    if len(weights) and (not len(losses) or weights[0] <= losses[0]):
        step, count = int(columns.step[weights[0]]), int(columns.values["nonfinite_parameters"][weights[0]])
        return Found(Verdict.DIVERGED, f"After step {step}, which was applied, {_plural(count)} non-finite.", step)
    if len(losses):
        step = int(columns.step[losses[0]])
        kind = KIND_NAMES[int(columns.kinds("loss")[losses[0]])]
        return Found(Verdict.DIVERGED, f"The loss of step {step}, which was applied, is {kind}.", step)
    if record.final is not None and record.final.nonfinite_parameters and record.applied:
        return Found(Verdict.DIVERGED, f"At the end {_plural(record.final.nonfinite_parameters)} non-finite.")
    return None


def _stalled(record: RunRecord) -> Found | None:
    final = record.final
    if final is not None and final.muon_parameters_moved == 0 and final.muon_parameters_total and record.steps:
        return Found(
            Verdict.STALLED,
            f"None of the {final.muon_parameters_total} parameters that Muon takes has moved since initialisation, "
            f"over {record.steps} steps of which {record.applied} were applied.",
        )
    if final is None and record.steps and not record.applied:
        return Found(Verdict.STALLED, f"All {record.steps} steps were discarded, so no parameter can have moved.")
    return None


def _absorbed(record: RunRecord) -> Found | None:
    found = record.absorption
    if found is None or not found.steps:
        return None
    names = record.parameter_names
    name = names[found.parameter] if 0 <= found.parameter < len(names) else None
    before, after = apart(found.before, found.after)
    return Found(
        Verdict.ABSORBED,
        f"The momentum{f' of {name}' if name else ''} moved from {before} to {after} on "
        f"step {found.first_step}, which was discarded; so did finite momentum on {found.steps} of "
        f"{found.discarded} discarded steps.",
        found.first_step,
        name,
    )


def _trains(record: RunRecord) -> Found | None:
    final = record.final
    if _why_not_trains(record) is not None or final is None:
        return None
    return Found(
        Verdict.TRAINS,
        f"All {record.planned_steps} steps were attempted and {record.applied} applied; "
        f"{final.parameters_moved} of {final.parameters_total} parameters moved, and of what was measured the "
        "momentum, the parameters and the losses of applied steps are finite.",
    )


def _why_not_trains(record: RunRecord) -> str | None:
    final = record.final
    if record.status is not RunStatus.SUCCEEDED:
        how = f"{record.status} as {record.failure.kind}" if record.failure is not None else str(record.status)
        return f"the run {how} after {record.steps} of {record.planned_steps} steps"
    if record.steps < record.planned_steps:
        return f"only {record.steps} of {record.planned_steps} steps were attempted"
    if not record.applied:
        return f"all {record.steps} steps were discarded"
    if final is None or final.parameters_moved is None or final.parameters_total is None:
        return "which parameters moved was not measured"
    if final.parameters_moved < final.parameters_total:
        return f"{final.parameters_moved} of {final.parameters_total} parameters moved"
    if (record.columns.kinds("momentum_norm") != FINITE).any() or record.poison is not None:
        return "the momentum was not finite throughout"
    if _diverged(record) is not None:
        return "not all that was recorded is finite"
    return None


def _no_muon(record: RunRecord) -> Found | None:
    final = record.final
    if not record.has_muon_optimizer or final is None or final.muon_parameters_total != 0:
        return None
    return Found(
        Finding.NO_MUON,
        f"The optimizer is Muon, and none of the {final.parameters_total} trainable parameters is routed to it: all "
        "are trained by its AdamW. The list of parameters says why.",
    )


def _inconclusive(record: RunRecord) -> Found:
    reason = _why_not_trains(record) or "the record proves nothing else"
    return Found(Verdict.INCONCLUSIVE, f"The record proves no verdict: {reason}.")


def _loss_rose(columns: StepColumns) -> Found | None:
    losses = columns.values["loss"]
    at = np.flatnonzero(np.isfinite(losses))
    if len(at) < 2:
        return None
    # Medians of both ends: one noisy batch is no trend.
    width = max(1, len(at) // _ENDS_SMOOTHED)
    begin, end = float(np.median(losses[at[:width]])), float(np.median(losses[at[-width:]]))
    if end <= begin:
        return None
    return Found(
        Finding.LOSS_ROSE,
        f"The loss rose from {_number(begin)} at step {columns.step[at[0]]} to {_number(end)} "
        f"at step {columns.step[at[-1]]}.",
        int(columns.step[at[-1]]),
    )


def absorption(pairs: Iterable[tuple[int, bytes, bytes]], discarded: int) -> Absorption | None:
    """Count the discarded steps on which finite momentum moved, by its norms before and after.

    Args:
        pairs: (step, packed norms before, after) of discarded steps in order; a run's first step has none before it,
            which is momentum of zero.
        discarded: how many steps were discarded.
    Returns:
        The count with the first such step and the parameter that moved most on it; None where nothing moved.
    """
    first: Absorption | None = None
    steps = 0
    for step, moves in _moves(pairs):
        steps += 1
        if first is None:
            parameter, before, after = moves
            first = Absorption(0, discarded, step, parameter, before, after)
    if first is None:
        return None
    return Absorption(steps, discarded, first.first_step, first.parameter, first.before, first.after)


def _moves(pairs: Iterable[tuple[int, bytes, bytes]]) -> Iterator[tuple[int, tuple[int, float, float]]]:
    for step, packed_before, packed_after in pairs:
        both = norms_matrix([packed_before or bytes(len(packed_after)), packed_after])
        if both is None or not both.size:
            continue
        before, after = both.astype(np.float64)
        with np.errstate(invalid="ignore"):
            change = np.where(np.isfinite(before) & np.isfinite(after), np.abs(after - before), 0.0)
        most = int(np.argmax(change))
        if change[most] > 0:
            yield step, (most, float(before[most]), float(after[most]))


def _plural(count: int) -> str:
    return "1 parameter is" if count == 1 else f"{count} parameters are"


def _number(value: float) -> str:
    return f"{value:.6g}"
