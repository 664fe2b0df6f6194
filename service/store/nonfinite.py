"""nonfinite_event: where a series turns non-finite, changes its kind or turns finite again.

Written with the steps, so that the first bad step and parameter are found without reading the record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from muonscope.contract.telemetry import SCALARS, StepRecord
from service.columns import Integers, kinds_of, norms_matrix
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


def transitions(records: Sequence[StepRecord], before: StepRecord | None) -> list[Transition]:
    """Compare each record with the one before it, the first with `before`; what is absent counts as finite."""
    chain = [before or StepRecord(-1, False, False), *records]
    return [*_scalar_transitions(chain), *_parameter_transitions(chain)]


def _scalar_transitions(chain: Sequence[StepRecord]) -> Iterator[Transition]:
    for scalar in SCALARS:
        column = [getattr(record, scalar) for record in chain]
        numbers = np.array([0.0 if value is None else value for value in column], np.float64)
        if not np.isfinite(numbers).all():
            for row, _, kind in _changes(kinds_of(numbers)[:, None]):
                yield Transition(scalar, WHOLE_MODEL, chain[row].step, kind)


def _parameter_transitions(chain: Sequence[StepRecord]) -> Iterator[Transition]:
    widest = max(len(record.parameter_norms) for record in chain)
    # Rows of another length (not measured on that step) are widened by zeros, which are finite.
    matrix = norms_matrix([record.parameter_norms.ljust(widest, b"\0") for record in chain])
    if matrix is not None and not np.isfinite(matrix).all():
        for row, parameter, kind in _changes(kinds_of(matrix)):
            yield Transition(PARAMETER_SCALAR, parameter, chain[row].step, kind)


def _changes(kinds: Integers) -> Iterator[tuple[int, int, int]]:
    rows, series = np.nonzero(kinds[1:] != kinds[:-1])
    for row, place in zip((rows + 1).tolist(), series.tolist(), strict=True):
        yield row, place, int(kinds[row, place])


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
