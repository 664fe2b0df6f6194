"""One parameter's blocks sum up exactly the norms they are derived from, however those arrived."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select, text

from muonscope.contract.telemetry import StepRecord
from service.columns import Outline, StepColumns, kind_lengths
from service.store.blocks import BLOCK_STEPS, BUCKET_STEPS
from service.store.models import ParameterBlock
from service.store.outlines import OutlineRepository
from service.store.parameter_blocks import PART
from service.store.session import Database
from service.store.steps import StepRepository
from tests.examples import dear
from tests.records import end_attempt, get_run, insert, norms, start_attempt, started, step_record

NAN, INF = math.nan, math.inf
KINDS = (NAN, INF, -INF)
NUM = PART + 3
LAST = NUM - 1


def _record(step: int, seed: int) -> StepRecord:
    """A step whose norms wander; now and then some are not finite, or all were not measured."""
    odd = (step * 7 + seed) % 97
    values = [math.sin(step * 12.9898 + seed + index) * 100 for index in range(NUM)]
    if odd < 20:
        values[LAST] = values[odd % NUM] = KINDS[odd % 3]
    return step_record(step, parameter_norms=b"" if odd == 50 else norms(*values))


def _read(
    database: Database, uid: str, index: int, start: int = 0, stop: int | None = None
) -> tuple[Outline | None, StepColumns]:
    with database.read() as session:
        run = get_run(session, uid)
        outline = OutlineRepository(session).read_parameter(run, index, start=start, stop=stop)
        return outline, StepRepository(session).parameter_columns(run, index, start=start, stop=stop)


def _assert_sums_up(outline: Outline | None, rows: StepColumns) -> None:
    """The obvious way: look at each bucket's rows."""
    assert outline is not None
    assert (outline.first[1:] > outline.last[:-1]).all()
    inside_any = np.zeros(len(rows), np.bool_)
    for first, last, pair in zip(outline.first, outline.last, outline.values["momentum_norm"], strict=True):
        inside = (rows.step >= first) & (rows.step <= last)
        inside_any |= inside
        values = rows.values["momentum_norm"][inside]
        finite = values[np.isfinite(values)]
        expected = [NAN, NAN]
        if len(finite):
            low, high = finite.min(), finite.max()
            expected = [high, low] if finite.tolist().index(high) < finite.tolist().index(low) else [low, high]
        assert np.array_equal(pair, expected, equal_nan=True), first
    assert inside_any.all()
    kinds = outline.marks.kinds["momentum_norm"]
    assert kind_lengths(kinds, outline.marks.step) == kind_lengths(rows.kinds("momentum_norm"), rows.step)


@settings(max_examples=dear(8), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), seed=st.integers(0, 96), count=st.integers(1, 2 * BLOCK_STEPS + 50))
def test_a_parameters_outline_is_that_of_its_norms_however_they_arrive(
    sqlite_database: Database, data: st.DataObject, seed: int, count: int
) -> None:
    uid, submission_id = started(sqlite_database, steps=2000)
    bounds = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=6))})
    batches = [[_record(step, seed) for step in range(first, stop)] for first, stop in pairwise(bounds)]
    for batch in data.draw(st.permutations(batches)) if data.draw(st.booleans()) else batches:
        insert(sqlite_database, submission_id, batch)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.none() | st.integers(start + 1, count + 5))

    for index in (0, LAST):
        _assert_sums_up(*_read(sqlite_database, uid, index, start, stop))


def test_parameter_blocks_are_kept_on_both_databases_once_their_steps_are_past(database: Database) -> None:
    uid, submission_id = started(database)
    for first in range(0, 1000, 250):
        insert(database, submission_id, [_record(step, 1) for step in range(first, first + 250)])

    with database.read() as session:
        stored = session.execute(
            select(ParameterBlock.part, ParameterBlock.number, func.length(ParameterBlock.extremes)).order_by(
                ParameterBlock.part, ParameterBlock.number
            )
        ).all()
    buckets = BLOCK_STEPS // BUCKET_STEPS
    assert stored == [(part, number, 8 * buckets * (PART, NUM - PART)[part]) for part in (0, 1) for number in (0, 1)]
    _assert_sums_up(*_read(database, uid, LAST))


def _resumed(database: Database, second_steps: Sequence[int]) -> str:
    """A first attempt of 1000 steps, and a second one that resumed at 500."""
    uid, first = started(database, steps=3000)
    insert(database, first, [_record(step, 1) for step in range(1000)])
    end_attempt(database, first)
    second = start_attempt(database, uid, first_step=500)
    insert(database, second, [_record(step, 2) for step in second_steps])
    return uid


def test_the_newest_attempts_norms_hide_those_they_take_the_place_of(database: Database) -> None:
    uid = _resumed(database, range(500, 700))

    for start, stop in ((0, None), (490, 720), (510, 520), (650, 990)):
        _assert_sums_up(*_read(database, uid, LAST, start, stop))


def test_a_record_from_before_there_were_blocks_is_read_from_its_steps(sqlite_database: Database) -> None:
    uid = _resumed(sqlite_database, range(500, 2000))
    with sqlite_database.write() as session:
        session.execute(delete(ParameterBlock).where(ParameterBlock.number == 2))
    _assert_sums_up(*_read(sqlite_database, uid, LAST))
    with sqlite_database.write() as session:
        session.execute(delete(ParameterBlock))
    _assert_sums_up(*_read(sqlite_database, uid, LAST))


def test_blocks_are_what_is_read_where_there_are_any(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [_record(step, 1) for step in range(BLOCK_STEPS)])
    with sqlite_database.write() as session:
        session.execute(text("UPDATE step SET momentum_norms = NULL"))

    outline, _ = _read(sqlite_database, uid, 0)

    assert outline is not None
    assert np.isfinite(outline.values["momentum_norm"]).all()


def test_where_steps_are_missing_the_rows_say_it(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [_record(step, 1) for step in [*range(10), *range(40, 600)]])

    outline, rows = _read(sqlite_database, uid, 0)

    assert outline is None
    assert len(rows) == 570


def test_a_parameter_beyond_those_that_were_measured_is_not_measured(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [_record(step, 1) for step in range(BLOCK_STEPS + 10)])

    for index in (NUM, 10 * PART):
        outline, rows = _read(sqlite_database, uid, index)
        assert outline is not None
        assert np.isnan(outline.values["momentum_norm"]).all()
        assert not rows.measured["momentum_norm"].any()


def test_a_parameter_block_fits_a_page(sqlite_database: Database) -> None:
    """A row that spilled onto an overflow page would double what a chart reads."""
    _, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [_record(step, 1) for step in range(BLOCK_STEPS)])
    with sqlite_database.read() as session:
        largest = session.execute(select(func.max(func.length(ParameterBlock.extremes)))).scalar_one()
    largest_local_payload, head = 4096 - 35, 40
    assert largest + head <= largest_local_payload
