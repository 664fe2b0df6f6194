import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from muonscope.contract.telemetry import COUNTS, SCALARS, StepRecord
from service.columns import run_lengths
from service.errors import Conflict, InvalidInput
from service.store.events import EventRepository
from service.store.nonfinite import NonfiniteRepository, Transition
from service.store.session import Database
from service.store.steps import SERIES_FIELDS, StepRepository, reached
from service.store.summary import get_scalar
from tests.examples import dear
from tests.records import (
    discarded_record,
    end_attempt,
    get_attempt,
    get_run,
    insert,
    norms,
    queue_run,
    start_attempt,
    started,
    step_record,
)

NAN, INF = math.nan, math.inf
numbers = st.none() | st.floats(width=64)
counts = st.none() | st.integers(-(2**63), 2**63 - 1)


@st.composite
def records(draw: st.DrawFn, step: int) -> StepRecord:
    return StepRecord(
        step, draw(st.booleans()), draw(st.booleans()),
        *(draw(numbers) for _ in SCALARS), *(draw(counts) for _ in COUNTS),
        norms(*draw(st.lists(st.floats(width=32), max_size=3))),
    )  # fmt: skip


def same(one: StepRecord, other: StepRecord) -> bool:
    """Equal, with NaN equal to itself."""
    pairs = zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    return all(a == b or (isinstance(a, float) and isinstance(b, float) and a != a and b != b) for a, b in pairs)


def stored(database: Database, uid: str) -> list[StepRecord]:
    with database.read() as session:
        return [current.record for current in StepRepository(session).walk(get_run(session, uid), chunk=3)]


def transitions_of(database: Database, uid: str) -> set[Transition]:
    with database.read() as session:
        return {found.transition for found in NonfiniteRepository(session).list(get_run(session, uid))}


@settings(max_examples=dear(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_value_comes_back_as_it_was_sent(database: Database, data: st.DataObject) -> None:
    uid, submission_id = started(database)
    sent = [data.draw(records(step)) for step in range(data.draw(st.integers(1, 5)))]
    insert(database, submission_id, sent)

    back = stored(database, uid)
    with database.read() as session:
        columns = StepRepository(session).columns(get_run(session, uid))

    assert all(same(one, other) for one, other in zip(sent, back, strict=True))
    for name in SCALARS:
        values = [getattr(record, name) for record in sent]
        assert columns.measured[name].tolist() == [value is not None for value in values]
        assert np.array_equal(columns.values[name], np.array(values, float), equal_nan=True)


def test_a_batch_sent_again_is_accepted_and_changes_nothing(database: Database) -> None:
    uid, submission_id = started(database)
    batch = [step_record(step, loss=NAN if step == 1 else 1.0, update_norm=None) for step in range(4)]
    first = insert(database, submission_id, batch)
    again = insert(database, submission_id, batch)
    overlapping = insert(database, submission_id, [*batch[2:], step_record(4)])

    assert (first.stored, first.new, first.next_step) == (4, 4, 4)
    assert (again.stored, again.new, again.next_step) == (4, 0, 4)
    assert (overlapping.stored, overlapping.new, overlapping.next_step) == (3, 1, 5)
    with database.read() as session:
        run = get_run(session, uid)
        assert (run.summary.steps, run.attempts[0].stored_steps, run.attempts[0].next_step) == (5, 5, 5)


@pytest.mark.parametrize(
    "change",
    [{"loss": 3.0}, {"loss": NAN}, {"loss": None}, {"tokens": 65}, {"overflow": True}, {"parameter_norms": b""},
     {"parameter_norms": norms(0.3, 0.5)}],
)  # fmt: skip
def test_a_stored_step_is_never_rewritten(database: Database, change: dict[str, object]) -> None:
    uid, submission_id = started(database)
    insert(database, submission_id, [step_record(0), step_record(1)])
    with pytest.raises(Conflict, match=r"step 1 .* stored with another"):
        insert(database, submission_id, [step_record(1, **change), step_record(2)])

    assert stored(database, uid) == [step_record(0), step_record(1)]


def test_the_kinds_of_non_finite_are_different_contents(database: Database) -> None:
    _, submission_id = started(database)
    insert(database, submission_id, [step_record(0, loss=NAN)])
    for value in (INF, -INF, None, 0.0):
        with pytest.raises(Conflict, match="another"):
            insert(database, submission_id, [step_record(0, loss=value)])


def test_one_step_twice_in_a_batch_is_stored_once_if_equal_and_refused_if_not(database: Database) -> None:
    uid, submission_id = started(database)
    insert(database, submission_id, [step_record(1), step_record(0), step_record(1)])
    with pytest.raises(Conflict):
        insert(database, submission_id, [step_record(2), step_record(2, loss=9.0)])

    assert stored(database, uid) == [step_record(0), step_record(1)]


def test_ranks_keep_their_own_rows_and_rank_zero_is_the_record(database: Database) -> None:
    uid, submission_id = started(database)
    insert(database, submission_id, [step_record(0)])
    other = insert(database, submission_id, [step_record(0, loss=7.0), step_record(1)], rank=1)
    again = insert(database, submission_id, [step_record(1)], rank=1)

    assert (other.new, other.next_step, again.new, again.stored) == (2, 2, 0, 1)
    assert stored(database, uid) == [step_record(0)]
    with database.read() as session:
        assert get_attempt(session, submission_id).stored_steps == 1


@pytest.mark.parametrize(("steps", "rank"), [([1000], 0), ([2**64 - 1], 0), ([0], 2), ([0], 2**31 - 1)])
def test_what_the_spec_leaves_no_room_for_is_refused(sqlite_database: Database, steps: list[int], rank: int) -> None:
    _, submission_id = started(sqlite_database)
    with pytest.raises(InvalidInput) as caught:
        insert(sqlite_database, submission_id, [step_record(step) for step in steps], rank=rank)
    assert caught.value.field == ("rank" if rank else "step")


def test_an_empty_batch_stores_nothing(sqlite_database: Database) -> None:
    _, submission_id = started(sqlite_database)
    insert(sqlite_database, submission_id, [step_record(0)])
    assert insert(sqlite_database, submission_id, []).next_step == 1


def test_steps_that_do_not_arrive_are_told_as_a_gap_and_may_still_come(database: Database) -> None:
    uid, submission_id = started(database)
    insert(database, submission_id, [step_record(0), step_record(3), step_record(6)])
    with database.read() as session:
        run = get_run(session, uid)
        gaps = [event.detail for event in EventRepository(session).after(0, run=run) if event.kind == "gap"]
        assert run.attempts[0].stored_steps == 3 < run.attempts[0].next_step

    insert(database, submission_id, [step_record(step) for step in (1, 2, 4, 5)])

    assert gaps == [{"first": 1, "last": 2}, {"first": 4, "last": 5}]
    with database.read() as session:
        attempt = get_run(session, uid).attempts[0]
        assert attempt.stored_steps == attempt.next_step == 7
        assert len([e for e in EventRepository(session).after(0) if e.kind == "gap"]) == 2


def test_the_summary_follows_the_record(database: Database) -> None:
    uid, submission_id = started(database)
    insert(database, submission_id, [step_record(0), discarded_record(1, momentum_norm=INF, loss=NAN)])
    insert(database, submission_id, [discarded_record(2, loss_scale_after=32768.0, momentum_norm=NAN, loss=None)])

    with database.read() as session:
        summary = get_run(session, uid).summary
    assert (summary.steps, summary.discarded, summary.overflows, summary.last_step) == (3, 2, 2, 2)
    assert get_scalar(summary, "final_loss_scale") == 32768.0
    assert math.isnan(get_scalar(summary, "last_momentum_norm") or 0)
    assert math.isnan(get_scalar(summary, "last_loss") or 0)
    assert summary.momentum_finite is False


def test_late_steps_do_not_turn_the_summary_back(database: Database) -> None:
    uid, submission_id = started(database)
    insert(database, submission_id, [step_record(5, loss=1.0)])
    insert(database, submission_id, [step_record(4, loss=9.0)])

    with database.read() as session:
        summary = get_run(session, uid).summary
    assert (summary.steps, summary.last_step, summary.last_loss) == (2, 5, 1.0)


def test_the_summary_is_of_the_newest_attempt_before_it_has_come_as_far_as_the_one_before(
    sqlite_database: Database,
) -> None:
    uid, first = started(sqlite_database)
    insert(sqlite_database, first, [step_record(step, loss=9.0) for step in range(6)])
    end_attempt(sqlite_database, first)
    second = start_attempt(sqlite_database, uid, first_step=1)
    insert(sqlite_database, second, [discarded_record(1, loss=2.0, loss_scale_after=1.0, momentum_norm=NAN)])

    with sqlite_database.read() as session:
        summary = get_run(session, uid).summary
    assert (summary.steps, summary.last_loss, summary.final_loss_scale) == (2, 2.0, 1.0)
    assert (summary.discarded, summary.overflows) == (1, 1)
    assert summary.momentum_finite is False


def _two_attempts(database: Database) -> str:
    """A first attempt of steps 0 to 5, a second one that resumed at 3 and got to 7."""
    uid, first = started(database)
    insert(database, first, [discarded_record(step, loss=1.0) for step in range(6)])
    end_attempt(database, first)
    second = start_attempt(database, uid, first_step=3)
    insert(database, second, [step_record(3, loss=2.0), step_record(4, loss=2.0)])
    insert(database, second, [step_record(step, loss=2.0) for step in (5, 6, 7)])
    return uid


def test_a_resumed_run_shows_the_newest_attempts_row_of_each_step(database: Database) -> None:
    uid = _two_attempts(database)
    with database.read() as session:
        run, steps = get_run(session, uid), StepRepository(session)
        page = steps.page(run, start=2, limit=3)
        columns = steps.columns(run, ("loss",), stop=7)
        view = session.execute(
            text("SELECT step, attempt FROM step_current WHERE run_id = :run ORDER BY step"), {"run": run.id}
        ).all()
        summary = run.summary

    assert [(at.record.step, at.attempt) for at in page.steps] == [(2, 1), (3, 2), (4, 2)]
    assert page.next_start == 5
    assert columns.step.tolist() == list(range(7))
    assert columns.values["loss"].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert view == [(step, 1 if step < 3 else 2) for step in range(8)]
    assert (summary.steps, summary.discarded, summary.overflows) == (8, 3, 3)


def test_a_second_attempt_that_has_recorded_less_hides_only_what_it_has(database: Database) -> None:
    uid, first = started(database)
    insert(database, first, [step_record(step, loss=1.0) for step in range(4)])
    end_attempt(database, first)
    second = start_attempt(database, uid, first_step=1)
    insert(database, second, [step_record(1, loss=2.0)])

    with database.read() as session:
        run, steps = get_run(session, uid), StepRepository(session)
        assert steps.columns(run, ("loss",)).values["loss"].tolist() == [1.0, 2.0, 1.0, 1.0]
        assert steps.norms_at(run, [1, 3, 9]).keys() == {1, 3}
        assert run.summary.steps == 2


@settings(max_examples=dear(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_the_counts_are_those_of_the_record_up_to_where_the_run_came(
    sqlite_database: Database, data: st.DataObject
) -> None:
    uid = queue_run(sqlite_database)
    for number in range(data.draw(st.integers(1, 4))):
        first_step = data.draw(st.integers(0, 8)) if number else 0
        submission_id = start_attempt(sqlite_database, uid, first_step=first_step)
        steps = data.draw(st.lists(st.integers(first_step, 12), unique=True, max_size=8))
        place = 0
        while place < len(steps):
            batch = sorted(steps[place : place + data.draw(st.integers(1, 4))])
            place += len(batch)
            make = [discarded_record if data.draw(st.booleans()) else step_record for _ in batch]
            insert(sqlite_database, submission_id, [kind(step) for kind, step in zip(make, batch, strict=True)])
            with sqlite_database.read() as session:
                run = get_run(session, uid)
                columns = StepRepository(session).columns(run, (), stop=reached(run))
                told = (run.summary.steps, run.summary.discarded, run.summary.overflows)
            assert told == (len(columns), columns.discarded.sum(), columns.overflow.sum())
        end_attempt(sqlite_database, submission_id)


def _expected_transitions(sent: Sequence[StepRecord]) -> set[Transition]:
    """The obvious way: walk the steps and compare each value with the one before."""
    expected = set()
    state: dict[tuple[str, int], int] = {}
    for record in sorted(sent, key=lambda record: record.step):
        series = {(name, -1): getattr(record, name) for name in SCALARS}
        packed = np.frombuffer(record.parameter_norms, "<f4").tolist()
        series |= {("momentum_norm", index): value for index, value in enumerate(packed)}
        for key in {*series, *state}:
            value = series.get(key)
            kind = 0 if value is None or math.isfinite(value) else 1 if value != value else 2 if value > 0 else 3
            if kind != state.get(key, 0):
                expected.add(Transition(key[0], key[1], record.step, kind))
            state[key] = kind
    return expected


@settings(max_examples=dear(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    kinds=st.lists(st.sampled_from([1.0, NAN, INF, -INF, None]), min_size=1, max_size=8),
)
def test_transitions_are_those_of_the_record_however_it_arrives(
    sqlite_database: Database, data: st.DataObject, kinds: list[float | None]
) -> None:
    uid, submission_id = started(sqlite_database)
    sent = [
        step_record(step, loss=kind, parameter_norms=b"" if kind is None else norms(1.0, kind))
        for step, kind in enumerate(kinds)
    ]
    arrival = data.draw(st.permutations(sent))
    while arrival:
        size = data.draw(st.integers(1, len(arrival)))
        insert(sqlite_database, submission_id, arrival[:size])
        arrival = arrival[size:]

    assert transitions_of(sqlite_database, uid) == _expected_transitions(sent)


def test_transitions_are_kept_on_both_databases(database: Database) -> None:
    uid, submission_id = started(database)
    sent = [step_record(0), step_record(1, momentum_norm=INF, parameter_norms=norms(1.0, INF))]
    sent += [step_record(2, momentum_norm=NAN, parameter_norms=norms(2.0, NAN)), step_record(3)]
    insert(database, submission_id, [sent[0], sent[3]])
    insert(database, submission_id, sent[1:3])

    assert transitions_of(database, uid) == _expected_transitions(sent)


def test_a_name_that_is_no_series_is_refused(sqlite_database: Database) -> None:
    uid, _ = started(sqlite_database)
    with pytest.raises(InvalidInput, match="momentum_norms"), sqlite_database.read() as session:
        StepRepository(session).columns(get_run(session, uid), ("loss", "momentum_norms"))


def test_a_run_without_steps_has_empty_columns(sqlite_database: Database) -> None:
    uid, _ = started(sqlite_database)
    with sqlite_database.read() as session:
        columns = StepRepository(session).columns(get_run(session, uid))
    assert len(columns) == 0
    assert set(columns.values) == set(SERIES_FIELDS)
    assert run_lengths(columns.overflow, columns.step) == []
