"""Outlines: a run's current record summed up for a chart, from blocks where they lie whole and from rows at the cuts.

The record's newest attempt gives the steps it has; earlier ones give what it lacks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.columns import Floats, Integers, Marks, Outline
from service.store.blocks import BLOCK_STEPS, BUCKET_STEPS, BlockRepository, joined, outline_of_rows
from service.store.models import Attempt, Run
from service.store.nonfinite import PARAMETER_SCALAR, NonfiniteRepository
from service.store.parameter_blocks import ParameterBlockRepository
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
        attempts = self._attempts(run, start)
        if len(attempts) > 1 and not all(map(_is_whole, attempts)):
            return None
        found = _longer(attempts, start, stop, longer_than)
        parts = [part for span in found for part in self._parts(span, names) if len(part.first)]
        return joined(parts) if parts else None

    def read_parameter(
        self, run: Run, index: int, *, start: int = 0, stop: int | None = None, longer_than: int = 0
    ) -> Outline | None:
        """Do the same with one parameter's momentum norms, as the series `momentum_norm`.

        Returns:
            None also where one attempt alone has a gap: what is known of non-finite norms is where they begin and end.
        """
        attempts = self._attempts(run, start)
        if not all(map(_is_whole, attempts)):
            return None
        found = _longer(attempts, start, stop, longer_than)
        parts = [part for span in found for part in self._parameter_parts(span, index) if len(part.first)]
        if not parts:
            return None
        outline = joined(parts)
        return replace(outline, marks=self._parameter_marks(found, index))

    def _attempts(self, run: Run, start: int) -> Sequence[Attempt]:
        return self._session.scalars(
            select(Attempt)
            .where(Attempt.run_id == run.id, Attempt.stored_steps > 0, Attempt.next_step > start)
            .order_by(Attempt.number)
        ).all()

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

    def _parameter_parts(self, span: Span, index: int) -> Iterator[Outline]:
        first, stop = span.blocks
        numbers, pairs = ParameterBlockRepository(self._session).read(span.attempt.id, first, stop, index)
        position, begin = span.first, 0
        # Of neighbouring blocks one part; what lies between them, before and after is read from the steps.
        for end in [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]:
            if begin == end:
                continue
            opens, closes = (int(number) * BLOCK_STEPS for number in (numbers[begin], numbers[end - 1] + 1))
            yield from self._parameter_rows(span.attempt, index, position, opens)
            yield _bucketed(numbers[begin:end], pairs[begin:end], span)
            position, begin = closes, end
        yield from self._parameter_rows(span.attempt, index, position, span.stop)

    def _parameter_rows(self, attempt: Attempt, index: int, first: int, stop: int) -> Iterator[Outline]:
        if first < stop:
            columns = StepRepository(self._session).attempt_parameter_columns(attempt.id, index, start=first, stop=stop)
            if len(columns):
                yield outline_of_rows(columns)

    def _parameter_marks(self, found: Sequence[Span], index: int) -> Marks:
        events = NonfiniteRepository(self._session)
        stretches = [
            stretch for span in found for stretch in events.stretches(span.attempt, index, span.first, span.stop)
        ]
        steps = np.concatenate([np.arange(0), *(np.arange(first, stop) for first, stop, _ in stretches)])
        kinds = np.concatenate([np.arange(0), *(np.full(stop - first, kind) for first, stop, kind in stretches)])
        plain = np.zeros(len(steps), np.bool_)
        return Marks(steps, plain, plain, {PARAMETER_SCALAR: kinds})


def _is_whole(attempt: Attempt) -> bool:
    return attempt.stored_steps == attempt.next_step - attempt.first_step


def _longer(attempts: Sequence[Attempt], start: int, stop: int | None, longer_than: int) -> Sequence[Span]:
    """Return which attempt gives which steps; none where these are no more than `longer_than`."""
    found = spans(attempts, start, stop)
    count = min(sum(span.stop - span.first for span in found), sum(it.stored_steps for it in attempts))
    return found if count > longer_than else ()


def _bucketed(numbers: Integers, pairs: Floats, span: Span) -> Outline:
    """Make blocks of one parameter, neither cut by the span nor with a gap in them, an outline without marks."""
    begins = (numbers[:, None] * BLOCK_STEPS + np.arange(0, BLOCK_STEPS, BUCKET_STEPS)).reshape(-1)
    first = np.maximum(begins, span.attempt.first_step)
    last = begins + BUCKET_STEPS - 1
    kept = first <= last
    none = np.zeros(0, np.int64)
    marks = Marks(none, none.astype(np.bool_), none.astype(np.bool_), {PARAMETER_SCALAR: none})
    return Outline(first[kept], last[kept], {PARAMETER_SCALAR: pairs.reshape(-1, 2)[kept]}, marks)


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
