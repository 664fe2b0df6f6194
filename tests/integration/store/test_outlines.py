"""Blocks sum up exactly the rows they are derived from, however those arrived."""

import math
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from muonscope.contract.telemetry import SCALARS, StepRecord
from service.columns import Outline, StepColumns, kind_lengths, run_lengths
from service.errors import InvalidInput
from service.store.blocks import BLOCK_STEPS, BUCKET_STEPS
from service.store.outlines import OutlineRepository
from service.store.session import Database
from service.store.steps import SERIES_FIELDS, StepRepository
from tests.examples import dear
from tests.records import discarded_record, end_attempt, get_run, insert, start_attempt, started, step_record

NAN, INF = math.nan, math.inf
KINDS = (None, NAN, INF, -INF)


def _record(step: int, seed: int) -> StepRecord:
    """A step whose values wander, with something odd now and then."""
    value = math.sin(step * 12.9898 + seed) * 100
    odd = (step * 7 + seed) % 31
    changes = {"loss": KINDS[odd] if odd < len(KINDS) else value, "grad_norm": None if odd == 9 else -value}
    return discarded_record(step, **changes) if odd == 5 else step_record(step, **changes)


def _read(database: Database, uid: str, start: int = 0, stop: int | None = None) -> tuple[Outline, StepColumns]:
    with database.read() as session:
        run = get_run(session, uid)
        outline = OutlineRepository(session).read(run, SERIES_FIELDS, start=start, stop=stop)
        assert outline is not None
        return outline, StepRepository(session).columns(run, start=start, stop=stop)


def _assert_sums_up(outline: Outline, rows: StepColumns) -> None:
    """The obvious way: look at each bucket's rows."""
    assert rows.step[0] >= outline.first[0]
    assert (outline.first[1:] > outline.last[:-1]).all()
    for place, (first, last) in enumerate(zip(outline.first, outline.last, strict=True)):
        inside = (rows.step >= first) & (rows.step <= last)
        for name in SERIES_FIELDS:
            values = rows.values[name][inside]
            finite = values[np.isfinite(values)]
            expected = [NAN, NAN]
            if len(finite):
                low, high = finite.min(), finite.max()
                falls = finite.tolist().index(high) < finite.tolist().index(low)
                expected = [high, low] if falls else [low, high]
            assert np.array_equal(outline.values[name][place], expected, equal_nan=True), (name, first)
    marks = outline.marks
    assert run_lengths(marks.overflow, marks.step) == run_lengths(rows.overflow, rows.step)
    assert run_lengths(marks.discarded, marks.step) == run_lengths(rows.discarded, rows.step)
    for name in SCALARS:
        assert kind_lengths(marks.kinds[name], marks.step) == kind_lengths(rows.kinds(name), rows.step)


@settings(max_examples=dear(8), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), count=st.integers(1, 2 * BLOCK_STEPS + 50))
def test_an_outline_is_that_of_the_rows_however_they_arrive(
    sqlite_database: Database, data: st.DataObject, seed: int, count: int
) -> None:
    uid, submission_id = started(sqlite_database, steps=2000)
    bounds = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=6))})
    batches = [[_record(step, seed) for step in range(first, stop)] for first, stop in pairwise(bounds)]
    for batch in data.draw(st.permutations(batches)) if data.draw(st.booleans()) else batches:
        insert(sqlite_database, submission_id, batch)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.none() | st.integers(start + 1, count + 5))

    _assert_sums_up(*_read(sqlite_database, uid, start, stop))


def test_blocks_are_kept_on_both_databases(database: Database) -> None:
    uid, submission_id = started(database)
    for first in range(0, 1000, 250):
        insert(database, submission_id, [_record(step, 1) for step in range(first, first + 250)])

    outline, rows = _read(database, uid)

    _assert_sums_up(outline, rows)
    assert len(outline.first) == -(-1000 // BUCKET_STEPS)


def test_a_gap_is_no_step_and_breaks_a_run(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    steps = [*range(10), *range(40, 60), *range(600, 700)]
    insert(sqlite_database, submission_id, [discarded_record(step) for step in steps])

    outline, rows = _read(sqlite_database, uid)

    assert run_lengths(outline.marks.overflow, outline.marks.step) == [(0, 9), (40, 59), (600, 699)]
    _assert_sums_up(outline, rows)


def _resumed(database: Database, second_steps: Sequence[int]) -> str:
    """A first attempt of 1000 steps, and a second one that resumed at 500."""
    uid, first = started(database)
    insert(database, first, [_record(step, 1) for step in range(1000)])
    end_attempt(database, first)
    second = start_attempt(database, uid, first_step=500)
    insert(database, second, [_record(step, 2) for step in second_steps])
    return uid


def test_the_newest_attempts_steps_hide_those_they_take_the_place_of(database: Database) -> None:
    uid = _resumed(database, range(500, 700))

    for start, stop in ((0, None), (490, 720), (510, 520), (650, 990)):
        _assert_sums_up(*_read(database, uid, start, stop))


def test_a_gap_that_an_earlier_attempt_shows_through_is_left_to_the_rows(sqlite_database: Database) -> None:
    uid = _resumed(sqlite_database, [*range(500, 520), *range(600, 700)])

    with sqlite_database.read() as session:
        run = get_run(session, uid)
        assert OutlineRepository(session).read(run, ["loss"]) is None
        assert len(StepRepository(session).columns(run)) == 1000


def test_a_record_no_longer_than_wanted_is_left_to_the_rows(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [step_record(step) for step in range(100)])

    with sqlite_database.read() as session:
        run, outlines = get_run(session, uid), OutlineRepository(session)
        assert outlines.read(run, ["loss"], longer_than=100) is None
        assert outlines.read(run, ["loss"], longer_than=99) is not None
        assert outlines.read(run, ["loss"], start=200) is None
        with pytest.raises(InvalidInput, match="momentum_norms"):
            outlines.read(run, ["momentum_norms"])


def test_other_ranks_leave_the_blocks_alone(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [step_record(0)])
    insert(sqlite_database, submission_id, [step_record(step, loss=-9.0) for step in range(5)], rank=1)

    outline, _ = _read(sqlite_database, uid)

    assert outline.values["loss"].tolist() == [[2.0, 2.0]]


def test_a_block_row_fits_a_page(sqlite_database: Database) -> None:
    """A row that spilled onto an overflow page would double what a chart reads."""
    _, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [step_record(step) for step in range(BLOCK_STEPS)])
    with sqlite_database.read() as session:
        ((size,),) = session.execute(text("SELECT length(extremes) FROM block")).all()
    largest_local_payload, head = 4096 - 35, 40
    assert size + head <= largest_local_payload


def test_steps_far_apart_cost_what_they_hold_and_not_what_lies_between(sqlite_database: Database) -> None:
    last = 10**8 - 1
    uid, submission_id = started(sqlite_database, steps=last + 1)
    insert(sqlite_database, submission_id, [step_record(step) for step in range(8)])

    tracemalloc.start()
    try:
        insert(sqlite_database, submission_id, [_record(step, 0) for step in (8, 5_000_000, last - 1, last)])
        outline, rows = _read(sqlite_database, uid)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    _assert_sums_up(outline, rows)
    assert rows.step.tolist() == [*range(9), 5_000_000, last - 1, last]
    assert len(outline.first) == 3
    # Measured: 0.4 MB. Room for every block between took 1.2 GB.
    assert peak < 8e6
