"""Steps: stored in bulk exactly once, read as rows or as columns.

A run's current record holds each step once, as the newest attempt that has it recorded it (the view `step_current`
says the same in SQL). Readers take rank 0's rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from muonscope.contract.telemetry import StepBatch, StepRecord
from service.columns import Integers, StepColumns
from service.errors import Conflict, InvalidInput
from service.store.blocks import BLOCK_STEPS, BlockRepository
from service.store.events import EventRepository
from service.store.models import Attempt, Run, Step
from service.store.nonfinite import NonfiniteRepository, transitions
from service.store.parameter_blocks import ParameterBlockRepository
from service.store.runs import RunRepository
from service.store.step_rows import (
    COLUMNS,
    FLAG_COLUMNS,
    KEY_WIDTH,
    SERIES_FIELDS,
    Row,
    batch_columns,
    parameter_columns,
    row_columns,
    to_columns,
    to_record,
    to_rows,
)
from service.store.summary import Recounted, add_steps
from service.store.types import read_clock

MAX_PAGE: Final = 10_000
_TABLE: Final = Step.__table__
_MAX_STEP: Final = 2**63 - 1
# A column's name, or what is reckoned from columns.
Wanted = str | ColumnElement[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """What an insert did: the batch's records now stored, how many were new, and the step after the newest."""

    stored: int
    new: int
    next_step: int


@dataclass(frozen=True, slots=True)
class CurrentStep:
    """One step of a run's current record and the number of the attempt that recorded it."""

    attempt: int
    record: StepRecord


@dataclass(frozen=True, slots=True)
class StepPage:
    steps: Sequence[CurrentStep]
    next_start: int | None


class StepRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    # -- storing ----------------------------------------------------------------------------------------------------

    def insert(self, attempt: Attempt, batch: StepBatch) -> Stored:
        """Store a batch's steps; those stored before, with the same content, count as stored.

        Keeps the run's summary, the attempt's counts and the non-finite transitions in the same transaction, and
        leaves a `gap` event where steps before the batch, or inside it, are missing. The caller has fenced the epoch.

        Raises:
            InvalidInput: a step or rank that the attempt cannot have.
            Conflict: a step is stored with other content, or given twice with two contents.
        """
        _refuse_foreign(attempt, batch)
        expected = self._next_step(attempt, batch.rank)
        if not len(batch):
            return Stored(0, 0, expected)
        sent, last = len(batch), max(batch.steps)
        columns = batch_columns(batch)
        if columns.step[0] < expected or (np.diff(columns.step) <= 0).any():
            rows = list(to_rows(attempt.id, batch, columns))
            batch = batch.take(self._new_places(attempt, batch, rows, expected))
            columns = batch_columns(batch)
        if len(batch):
            self._write(to_rows(attempt.id, batch, columns))
            if batch.rank == 0:
                self._follow_up(attempt, batch, columns, expected)
        return Stored(sent, len(batch), max(expected, last + 1))

    def _new_places(self, attempt: Attempt, batch: StepBatch, rows: Sequence[Row], expected: int) -> list[int]:
        """Return where the batch's new steps are, in step order; raises Conflict."""
        in_order = sorted(range(len(batch)), key=batch.steps.__getitem__)
        first, last = batch.steps[in_order[0]], batch.steps[in_order[-1]]
        known = {row[1]: row for row in self._rows(attempt.id, batch.rank, first, last)} if first < expected else {}
        new = []
        for place in in_order:
            row = rows[place]
            earlier = known.get(row[1])
            if earlier is None:
                known[row[1]] = row
                new.append(place)
            elif row[KEY_WIDTH:] != tuple(earlier[KEY_WIDTH:]):
                raise _content_conflict(attempt, row, earlier)
        return new

    def _next_step(self, attempt: Attempt, rank: int) -> int:
        if rank == 0:
            return attempt.next_step
        newest = self._session.scalars(
            select(func.max(_TABLE.c.step)).where(_TABLE.c.attempt_id == attempt.id, _TABLE.c.rank == rank)
        ).one()
        return attempt.first_step if newest is None else newest + 1

    def _write(self, rows: Iterable[Row]) -> None:
        connection = self._session.connection()
        names = ", ".join(COLUMNS)
        # The driver takes rows as they are made: no thousands of them at once.
        driver: Any = connection.connection.dbapi_connection
        with closing(driver.cursor()) as cursor:
            if connection.dialect.name == "sqlite":
                places = ", ".join("?" * len(COLUMNS))
                cursor.executemany(f"INSERT INTO step ({names}) VALUES ({places})", rows)
                return
            # COPY takes a third of the time of an executemany, pipelined or not.
            with cursor.copy(f"COPY step ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)

    def _follow_up(self, attempt: Attempt, batch: StepBatch, columns: StepColumns, expected: int) -> None:
        is_append = int(columns.step[0]) >= expected
        if is_append:
            self._tell_gaps(attempt, columns.step, expected)
            BlockRepository(self._session).append(attempt.id, columns)
            ParameterBlockRepository(self._session).append(attempt.id, expected, columns.step, batch)
        else:
            # It fills a gap that was told already.
            self._rebuild_blocks(attempt, columns.step)
            first, last = int(columns.step[0]), int(columns.step[-1])
            ParameterBlockRepository(self._session).rebuild(attempt.id, first, last, before=max(expected, last + 1))
        is_late = int(columns.step[-1]) < expected
        add_steps(attempt.run.summary, columns, self._recounted(attempt, columns.step, expected), is_late=is_late)
        self._note_transitions(attempt, batch, columns, is_append=is_append)
        attempt.stored_steps += len(columns)
        attempt.next_step = max(expected, int(columns.step[-1]) + 1)
        attempt.stepped_at = read_clock(self._session)
        RunRepository(self._session).touch(attempt.run)

    def _tell_gaps(self, attempt: Attempt, steps: Integers, expected: int) -> None:
        before = np.concatenate(([expected - 1], steps[:-1]))
        for place in np.flatnonzero(steps - before > 1).tolist():
            first, last = int(before[place]) + 1, int(steps[place]) - 1
            EventRepository(self._session).append(
                "gap",
                attempt=attempt,
                who="store",
                why=f"steps {first} to {last} did not arrive",
                detail={"first": first, "last": last},
            )

    def _rebuild_blocks(self, attempt: Attempt, steps: Integers) -> None:
        first, last = (int(step) // BLOCK_STEPS * BLOCK_STEPS for step in (steps[0], steps[-1]))
        found = self._rows(attempt.id, 0, first, last + BLOCK_STEPS - 1, (*FLAG_COLUMNS, *SERIES_FIELDS))
        columns = to_columns(found, SERIES_FIELDS, [attempt.number] * len(found))
        BlockRepository(self._session).replace(attempt.id, columns)

    def _recounted(self, attempt: Attempt, steps: Integers, expected: int) -> Recounted:
        """Return which steps of earlier attempts count no more, or count again, once these are stored.

        What counts is the record up to the step that the run came to, as `reached` says it: with its first steps an
        attempt takes the run back to where it resumed, and across a gap it takes in what lies before it.
        """
        earlier = self._session.execute(
            select(Attempt.id, Attempt.next_step)
            .where(Attempt.run_id == attempt.run_id, Attempt.number < attempt.number, Attempt.stored_steps > 0)
            .order_by(Attempt.number)
        ).all()
        if not earlier:
            return Recounted()
        before = expected if attempt.stored_steps else earlier[-1].next_step
        now = max(expected, int(steps[-1]) + 1)
        first, last = min(before, int(steps[0])), max(before, now) - 1
        flags: dict[int, tuple[bool, bool]] = {}
        for attempt_id, next_step in earlier:
            if next_step > first:
                found = self._rows(attempt_id, 0, first, last, ("step", "overflow", "discarded"))
                flags |= {step: (bool(overflow), bool(discarded)) for step, overflow, discarded in found}
        new = set(steps.tolist())
        return Recounted(
            out=[flags[step] for step in flags if step < before and not (step < now and step not in new)],
            back=[flags[step] for step in flags if before <= step < now and step not in new],
        )

    def _note_transitions(self, attempt: Attempt, batch: StepBatch, columns: StepColumns, *, is_append: bool) -> None:
        first, last = int(columns.step[0]), int(columns.step[-1])
        norms = batch.norms_of()
        if not is_append:
            # The stored step that now follows them has another one before it.
            follower = self._session.scalars(
                select(func.min(_TABLE.c.step)).where(
                    _TABLE.c.attempt_id == attempt.id, _TABLE.c.step > last, _TABLE.c.rank == 0
                )
            ).one()
            last = follower if follower is not None else last
            rows = self._rows(attempt.id, 0, first, last)
            columns, norms = row_columns(rows), [bytes(row[-1] or b"") for row in rows]
        before = self._session.execute(
            select(*_named(COLUMNS))
            .where(_TABLE.c.attempt_id == attempt.id, _TABLE.c.step < first, _TABLE.c.rank == 0)
            .order_by(_TABLE.c.step.desc())
            .limit(1)
        ).one_or_none()
        found = transitions(columns, norms, to_record(before) if before is not None else None)
        NonfiniteRepository(self._session).replace(attempt, found, first=first, last=None if is_append else last)

    # -- reading ----------------------------------------------------------------------------------------------------

    def page(self, run: Run, *, start: int = 0, stop: int | None = None, limit: int = 1000) -> StepPage:
        """Return steps start <= step < stop of the run's current record, at most `limit`.

        Raises:
            InvalidInput: a limit or bound out of range.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidInput(
                f"limit={limit} is out of range", field="limit", value=limit, remedy=f"use 1 to {MAX_PAGE}"
            )
        rows = list(self._current(run, COLUMNS, start, stop, limit + 1))
        steps = [CurrentStep(number, to_record(row)) for number, row in rows[:limit]]
        return StepPage(steps, rows[limit][1][1] if len(rows) > limit else None)

    def walk(self, run: Run, *, start: int = 0, stop: int | None = None, chunk: int = 5000) -> Iterator[CurrentStep]:
        """Yield the same, all of it, a chunk in memory at a time."""
        following: int | None = start
        while following is not None:
            page = self.page(run, start=following, stop=stop, limit=chunk)
            yield from page.steps
            following = page.next_start

    def columns(
        self, run: Run, names: Sequence[str] = SERIES_FIELDS, *, start: int = 0, stop: int | None = None
    ) -> StepColumns:
        """Return the run's current record as arrays.

        Raises:
            InvalidInput: a name that is no series.
        """
        refuse_unknown_series(names)
        found = list(self._current(run, (*FLAG_COLUMNS, *names), start, stop, None))
        return to_columns([row for _, row in found], names, [number for number, _ in found])

    def parameter_norms(
        self, run: Run, index: int, *, start: int = 0, stop: int | None = None, limit: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Return (step, packed norm) of one parameter in the run's current record; empty where it was not measured."""
        rows = self._current(run, ("step", _norm_of(index)), start, stop, limit)
        return [(row[0], bytes(row[1] or b"")) for _, row in rows]

    def parameter_columns(self, run: Run, index: int, *, start: int = 0, stop: int | None = None) -> StepColumns:
        """Return one parameter's momentum norms of the run's current record as the column `momentum_norm`."""
        rows = list(self._current(run, ("step", _norm_of(index)), start, stop, None))
        return parameter_columns([row for _, row in rows], [number for number, _ in rows])

    def attempt_parameter_columns(self, attempt_id: int, index: int, *, start: int, stop: int) -> StepColumns:
        """Return the same of one attempt's steps, whatever other attempts recorded."""
        rows = self._rows(attempt_id, 0, start, stop - 1, ("step", _norm_of(index)))
        return parameter_columns(rows, [0] * len(rows))

    def norms_at(self, run: Run, steps: Sequence[int]) -> dict[int, bytes]:
        """Return the packed momentum norms of those of these steps, a few hundred at most, that the record holds."""
        table = _TABLE.c
        rows = self._session.execute(
            select(table.step, table.momentum_norms)
            .join(Attempt, Attempt.id == table.attempt_id)
            .where(Attempt.run_id == run.id, table.step.in_(steps), table.rank == 0)
            .order_by(Attempt.number)
        )
        # Of several attempts' rows the newest comes last and stays.
        return {step: bytes(norms or b"") for step, norms in rows}

    def attempt_columns(
        self, attempt_id: int, names: Sequence[str], *, start: int, stop: int, limit: int | None = None
    ) -> StepColumns:
        """Return one attempt's steps start <= step < stop as arrays, whatever other attempts recorded."""
        found = self._rows(attempt_id, 0, start, stop - 1, (*FLAG_COLUMNS, *names), limit)
        return to_columns(found, names, [0] * len(found))

    def _current(
        self, run: Run, names: Sequence[Wanted], start: int, stop: int | None, limit: int | None
    ) -> Iterator[tuple[int, Row]]:
        """Yield (attempt number, row) by step, the newest attempt's row of each.

        Each attempt gives its own first `limit` rows, a range of the primary key; the first `limit` steps of all are
        among them.
        """
        if not 0 <= start <= _MAX_STEP or (stop is not None and not 0 <= stop <= _MAX_STEP):
            raise InvalidInput("start and stop are steps", field="start", value=start, remedy="use 0 or more")
        attempts = self._session.execute(
            select(Attempt.id, Attempt.number)
            .where(Attempt.run_id == run.id, Attempt.stored_steps > 0, Attempt.next_step > start)
            .order_by(Attempt.number)
        ).all()
        last = None if stop is None else stop - 1
        place = names.index("step")
        merged: list[tuple[int, Row]] = []
        for attempt_id, number in attempts:
            newer = [(number, row) for row in self._rows(attempt_id, 0, start, last, names, limit)]
            if merged:
                taken = {row[place] for _, row in newer}
                newer.extend(pair for pair in merged if pair[1][place] not in taken)
                newer.sort(key=lambda pair: pair[1][place])
            merged = newer
        yield from merged[:limit]

    def _rows(
        self,
        attempt_id: int,
        rank: int,
        first: int,
        last: int | None,
        names: Sequence[Wanted] = COLUMNS,
        limit: int | None = None,
    ) -> Sequence[Row]:
        table = _TABLE.c
        query = select(*_named(names)).where(table.attempt_id == attempt_id, table.step >= first, table.rank == rank)
        if last is not None:
            query = query.where(table.step <= last)
        return self._session.execute(query.order_by(table.step).limit(limit)).all()


def reached(run: Run) -> int | None:
    """Return the step that a run came to: what a lost attempt recorded from there on has not happened to it.

    None where no attempt has stored a step; the attempts are loaded.
    """
    return next((attempt.next_step for attempt in reversed(run.attempts) if attempt.stored_steps), None)


def _named(names: Sequence[Wanted]) -> list[Any]:
    return [_TABLE.c[name] if isinstance(name, str) else name for name in names]


def _norm_of(index: int) -> ColumnElement[Any]:
    return func.substr(_TABLE.c.momentum_norms, 4 * index + 1, 4)


def refuse_unknown_series(names: Sequence[str]) -> None:
    """Raise InvalidInput for a name that is no series."""
    for name in names:
        if name not in SERIES_FIELDS:
            raise InvalidInput(
                f"{name} is not a series of numbers",
                field="fields",
                value=name,
                remedy=f"use some of {', '.join(SERIES_FIELDS)}",
            )


def _refuse_foreign(attempt: Attempt, batch: StepBatch) -> None:
    """Refuse a rank or step that the attempt's spec leaves no room for."""
    run = attempt.run
    if batch.rank >= run.world_size:
        raise InvalidInput(
            f"rank {batch.rank} does not exist at world_size={run.world_size}",
            field="rank",
            value=batch.rank,
            remedy="send the rank that recorded the batch",
        )
    if len(batch) and not attempt.first_step <= min(batch.steps) <= max(batch.steps) < run.steps:
        foreign = next(step for step in batch.steps if not attempt.first_step <= step < run.steps)
        raise InvalidInput(
            f"step {foreign} is none of this attempt's, which begins at {attempt.first_step} of {run.steps}",
            field="step",
            value=foreign,
            remedy=f"send steps {attempt.first_step} to {run.steps - 1}",
        )


def _content_conflict(attempt: Attempt, sent: Row, stored: Row) -> Conflict:
    differing = [
        name for name, one, other in zip(COLUMNS, sent, stored, strict=True) if one != other and name != "rank"
    ]
    return Conflict(
        f"step {sent[1]} of {attempt.submission_id} is stored with another {' and '.join(differing)}",
        field="step",
        value=sent[1],
        remedy="a record is never rewritten; find out which of the two is true",
    )
