"""nonfinite_event: where a series turns non-finite, changes its kind or turns finite again.

Written with the steps, so that the first bad step and parameter are found without reading the record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from muonscope.contract.telemetry import SCALARS, StepRecord
from service.columns import FINITE, Integers, StepColumns, kinds_of, norms_matrix
from service.store.models import Attempt, NonfiniteEvent, Run

PARAMETER_SCALAR = "momentum_norm"
WHOLE_MODEL = -1


@dataclass(frozen=True, slots=True)
class Transition:
    """From this step on, the series has this kind."""

    scalar: str
    parameter: int
    step: int
    kind: int


@dataclass(frozen=True, slots=True)
class AttemptTransition:
    """A transition and the number of the attempt that recorded it."""

    attempt: int
    transition: Transition


def transitions(columns: StepColumns, norms: Sequence[bytes], before: StepRecord | None) -> list[Transition]:
    """Compare each step with the one before it, the first with `before`; what is absent counts as finite.

    Args:
        columns: one step or more, with all scalars.
        norms: each step's packed momentum norms.
        before: the stored step that precedes them.
    """
    before = before or StepRecord(-1, False, False)
    steps: list[int] = columns.step.tolist()
    return [
        *_scalar_transitions(columns, steps, before),
        *_parameter_transitions([before.parameter_norms, *norms], steps),
    ]


def _scalar_transitions(columns: StepColumns, steps: Sequence[int], before: StepRecord) -> Iterator[Transition]:
    for scalar in SCALARS:
        earlier = getattr(before, scalar)
        kind_before = kinds_of(np.array([0.0 if earlier is None else earlier]))
        kinds = np.concatenate((kind_before, columns.kinds(scalar)))
        if kinds.any():
            for row, _, kind in _changes(kinds[:, None]):
                yield Transition(scalar, WHOLE_MODEL, steps[row], kind)


def _parameter_transitions(chain: Sequence[bytes], steps: Sequence[int]) -> Iterator[Transition]:
    widest = max(map(len, chain))
    if not widest:
        return
    # Rows of another length (not measured on that step) are widened by zeros, which are finite.
    matrix = norms_matrix([norms.ljust(widest, b"\0") for norms in chain])
    if matrix is not None and not np.isfinite(matrix).all():
        for row, parameter, kind in _changes(kinds_of(matrix)):
            yield Transition(PARAMETER_SCALAR, parameter, steps[row], kind)


def _changes(kinds: Integers) -> Iterator[tuple[int, int, int]]:
    """Yield (row without the first one, series, new kind) of each change from one row to the next."""
    rows, series = np.nonzero(kinds[1:] != kinds[:-1])
    for row, place in zip(rows.tolist(), series.tolist(), strict=True):
        yield row, place, int(kinds[row + 1, place])


class NonfiniteRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def replace(self, attempt: Attempt, found: Sequence[Transition], *, first: int, last: int | None) -> None:
        """Keep these as all of the attempt's transitions from step `first` to `last`; None: nothing is stored there."""
        if last is not None:
            self._session.execute(
                delete(NonfiniteEvent).where(
                    NonfiniteEvent.attempt_id == attempt.id, NonfiniteEvent.step.between(first, last)
                )
            )
        if found:
            self._session.execute(
                insert(NonfiniteEvent),
                [
                    {"attempt_id": attempt.id, "scalar": at.scalar, "parameter": at.parameter, "step": at.step,
                     "kind": at.kind}
                    for at in found
                ],
            )  # fmt: skip

    def stretches(self, attempt: Attempt, parameter: int, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first step, step to end before, kind) of each stretch of one parameter's norms that are not finite.

        Only those of the steps first <= step < stop; the attempt has all of these.
        """
        event = NonfiniteEvent
        rows = self._session.execute(
            select(event.step, event.kind)
            .where(event.attempt_id == attempt.id, event.scalar == PARAMETER_SCALAR, event.parameter == parameter)
            .where(event.step < stop)
            .order_by(event.step)
        ).all()
        for place, (step, kind) in enumerate(rows):
            following = rows[place + 1][0] if place + 1 < len(rows) else stop
            if kind != FINITE and following > first:
                yield max(step, first), following, kind

    def list(self, run: Run) -> Sequence[AttemptTransition]:
        """List every transition of the run's attempts, by step, then parameter."""
        event = NonfiniteEvent
        rows = self._session.execute(
            select(Attempt.number, event.scalar, event.parameter, event.step, event.kind)
            .join(Attempt, Attempt.id == event.attempt_id)
            .where(Attempt.run_id == run.id)
            .order_by(event.step, event.parameter, Attempt.number)
        )
        return [
            AttemptTransition(number, Transition(scalar, parameter, step, kind))
            for number, scalar, parameter, step, kind in rows
        ]
