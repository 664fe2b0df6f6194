"""Outlines: a run's current record summed up for a chart, from blocks where they lie whole and from rows at the cuts.

The record's newest attempt gives the steps it has; earlier ones give what it lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.columns import Outline
from service.store.blocks import BLOCK_STEPS, BlockRepository, joined, outline_of_rows
from service.store.models import Attempt, Run
from service.store.steps import StepRepository, refuse_unknown_series


@dataclass(frozen=True, slots=True)
class Span:
    """The steps first <= step < stop that one attempt gives to the record."""

    attempt: Attempt
    first: int
    stop: int

    @property
    def blocks(self) -> tuple[int, int]:
        """The first block that lies wholly in the span, and the one after the last.

        Before its first and after its last stored step an attempt has nothing: a block there is whole, too.
        """
        is_cut_before, is_cut_after = self.first > self.attempt.first_step, self.stop < self.attempt.next_step
        first = -(-self.first // BLOCK_STEPS) if is_cut_before else self.first // BLOCK_STEPS
        stop = self.stop // BLOCK_STEPS if is_cut_after else -(-self.stop // BLOCK_STEPS)
        return first, max(first, stop)


class OutlineRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def read(
        self, run: Run, names: Sequence[str], *, start: int = 0, stop: int | None = None, longer_than: int = 0
    ) -> Outline | None:
        """Sum up steps start <= step < stop of the run's current record.

        Args:
            run: whose.
            names: series, of SCALARS and COUNTS.
            start: the first step wanted.
            stop: the step to end before; None: no end.
            longer_than: give nothing where at most so many steps are wanted.
        Returns:
            None where rows must say it: the record is no longer than that, or several attempts make it up and one
            of them has a gap, through which an earlier one shows.
        Raises:
            InvalidInput: a name that is no series.
        """
        refuse_unknown_series(names)
        attempts = self._session.scalars(
            select(Attempt)
            .where(Attempt.run_id == run.id, Attempt.stored_steps > 0, Attempt.next_step > start)
            .order_by(Attempt.number)
        ).all()
        if len(attempts) > 1 and any(it.stored_steps != it.next_step - it.first_step for it in attempts):
            return None
        found = spans(attempts, start, stop)
        if min(sum(span.stop - span.first for span in found), sum(it.stored_steps for it in attempts)) <= longer_than:
            return None
        parts = [part for span in found for part in self._parts(span, names) if len(part.first)]
        return joined(parts) if parts else None

    def _parts(self, span: Span, names: Sequence[str]) -> list[Outline]:
        first, stop = span.blocks
        if first == stop:
            return self._rows(span.attempt, names, span.first, span.stop)
        return [
            *self._rows(span.attempt, names, span.first, first * BLOCK_STEPS),
            BlockRepository(self._session).read(span.attempt.id, first, stop, names),
            *self._rows(span.attempt, names, stop * BLOCK_STEPS, span.stop),
        ]

    def _rows(self, attempt: Attempt, names: Sequence[str], first: int, stop: int) -> list[Outline]:
        if first >= stop:
            return []
        columns = StepRepository(self._session).attempt_columns(attempt.id, names, start=first, stop=stop)
        return [outline_of_rows(columns)] if len(columns) else []


def spans(attempts: Sequence[Attempt], start: int, stop: int | None) -> list[Span]:
    """Divide the wanted steps among attempts, in step order; the newest has what it can give."""
    free = [(start, 2**63 if stop is None else stop)]
    taken: list[Span] = []
    for attempt in reversed(attempts):
        left: list[tuple[int, int]] = []
        for first, end in free:
            inner_first, inner_end = max(first, attempt.first_step), min(end, attempt.next_step)
            if inner_first >= inner_end:
                left.append((first, end))
                continue
            taken.append(Span(attempt, inner_first, inner_end))
            left += [(first, inner_first), (inner_end, end)]
        free = [(first, end) for first, end in left if first < end]
    return sorted(taken, key=lambda span: span.first)
