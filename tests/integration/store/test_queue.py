"""The line, the queue's mode and its limits, on both databases."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import update

from muonscope.contract.attempts import Failure
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind, LimitKind, QueueMode, RunStatus
from service.controller.transitions import LEGAL
from service.errors import NotFound, Unavailable
from service.store.attempts import AttemptRepository
from service.store.events import EventRepository
from service.store.models import QueueEntry
from service.store.queue import QueueRepository
from service.store.runs import RunRepository
from service.store.session import Database, Session

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def queue_runs(session: Session, *priorities: int, submitted_by: str | None = None) -> list[str]:
    runs = RunRepository(session)
    return [
        runs.create(RunSpec(priority=priority, world_size=2), submitted_by=submitted_by)[0].uid
        for priority in priorities
    ]


def line(session: Session) -> list[str]:
    by_id = {run.id: run.uid for run in RunRepository(session).queued()}
    return [by_id[entry.run_id] for entry in QueueRepository(session).line()]


def move(session: Session, uid: str, *statuses: RunStatus) -> None:
    runs = RunRepository(session)
    for status in statuses:
        runs.set_status(runs.get(uid), status, legal=LEGAL, who="test", why="test")


def test_within_a_priority_the_first_to_come_is_the_first_in_line(database: Database) -> None:
    with database.write() as session:
        a, b, c, d = queue_runs(session, 0, 1, 0, 1)

        assert line(session) == [b, d, a, c]


def test_a_run_that_has_waited_long_stands_before_a_newer_one_of_higher_priority(database: Database) -> None:
    with database.write() as session:
        old, new = queue_runs(session, 0, 1)
        assert line(session) == [new, old]

        # Both may have come in the same moment of the database's clock.
        session.execute(update(QueueEntry).where(QueueEntry.run_id == 1).values(queued_at=LONG_AGO))
        # A point of priority is worth next to nothing now.
        QueueRepository(session).reckon_with(1e-6)
        session.flush()

        assert line(session) == [old, new]


def test_a_long_line_is_read_in_its_order_a_page_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.store.queue._FIRST_PAGE", 2)
    with database.write() as session:
        uids = queue_runs(session, *(0, 1, 2) * 5)
        started = uids[4]
        move(session, started, RunStatus.PENDING)
        in_order = [*uids[2::3], *uids[1::3], *uids[0::3]]
        in_order.remove(started)

        assert line(session) == in_order


def test_what_a_tick_asks_about_those_behind_a_place(database: Database) -> None:
    with database.write() as session:
        runs, queue = RunRepository(session), QueueRepository(session)
        assert queue.sizes() is None
        ids = [runs.create(RunSpec(world_size=size))[0].id for size in (1, 2, 4, 2, 8, 2)]
        first, second, third, fourth, fifth, sixth = ids
        places = {entry.run_id: (entry.rank, entry.run_id) for entry in queue.line()}
        queue.set_reasons({first: "told", fourth: "told"})

        assert queue.sizes() == (1, 8)
        assert queue.told_otherwise("told", limit=10) == [second, third, fifth, sixth]
        assert queue.told_otherwise("told", limit=2) == [second, third]
        assert queue.told_otherwise("told", behind=places[second], most_gpus=4, limit=10) == [third, sixth]
        assert [entry.run_id for entry in queue.larger(2, behind=places[second])] == [third, fifth]
        assert [entry.run_id for entry in queue.larger(2, behind=places[third])] == [fifth]


def test_positions_count_those_before_in_the_same_order(database: Database) -> None:
    with database.write() as session:
        a, b, c = queue_runs(session, 0, 5, 0)
        runs = RunRepository(session)

        together = runs.queue_positions([runs.get(uid) for uid in (a, b, c)])

        assert together == {b: 1, a: 2, c: 3}
        assert [runs.queue_positions([runs.get(uid)])[uid] for uid in (a, b, c)] == [2, 1, 3]


def test_a_run_leaves_the_line_when_it_starts_and_is_forgotten_when_it_has_ended(database: Database) -> None:
    with database.write() as session:
        (uid,) = queue_runs(session, 0)
        queue = QueueRepository(session)

        move(session, uid, RunStatus.PENDING)
        assert (list(queue.line()), [entry.gpus for entry in queue.holding()]) == ([], [2.0])
        move(session, uid, RunStatus.STOPPED)
        assert queue.counts() == (0, 0)


def test_a_run_queued_again_by_policy_keeps_its_place_and_by_hand_joins_the_end(database: Database) -> None:
    with database.write() as session:
        first, second = queue_runs(session, 0, 0)
        runs, attempts = RunRepository(session), AttemptRepository(session)
        attempt = attempts.create(runs.get(first), enrolment_token="t", lease_s=1)
        move(session, first, RunStatus.PENDING)
        failure = Failure(kind=FailureKind.WORKER_DIED)
        attempts.set_status(attempt, attempt.status.FAILED, who="t", why="t", failure=failure)

        move(session, first, RunStatus.QUEUED)

        assert line(session) == [first, second]
        entry = next(QueueRepository(session).line())
        assert entry.attempts == 1
        assert entry.failed_at is not None
        move(session, first, RunStatus.STOPPED, RunStatus.QUEUED)
        assert line(session) == [second, first]
        assert list(QueueRepository(session).line())[1].failed_at is None


def test_a_reason_is_the_runs_and_a_change_a_live_view_sees(database: Database) -> None:
    with database.write() as session:
        a, b = queue_runs(session, 0, 0)
        runs = RunRepository(session)
        seen = runs.last_revision()
        QueueRepository(session).set_reasons({runs.get(a).id: "needs 2 GPUs, 0 free", runs.get(b).id: "waits"})

    with database.read() as session:
        changed = RunRepository(session).changed_after(seen)
        assert [(run.uid, run.waiting_reason) for run in changed] == [(a, "needs 2 GPUs, 0 free"), (b, "waits")]
        assert [entry.reason for entry in QueueRepository(session).line()] == ["needs 2 GPUs, 0 free", "waits"]


def test_a_change_of_mode_is_an_event_with_who_and_why(database: Database) -> None:
    with database.write() as session:
        queue = QueueRepository(session)
        assert queue.set_mode(QueueMode.DRAINING, who="ann", why="new disks")
        assert not queue.set_mode(QueueMode.DRAINING, who="bob", why="also")
        with pytest.raises(Unavailable, match="draining, by ann: new disks"):
            queue.refuse_while_draining()

        (event,) = EventRepository(session).after()

    assert (event.kind, event.from_status, event.to_status) == ("queue_mode", "open", "draining")
    assert (event.who, event.why) == ("ann", "new disks")


def test_limits_are_set_changed_and_taken_away_each_with_an_event(database: Database) -> None:
    with database.write() as session:
        queue = QueueRepository(session)
        queue.set_limit(LimitKind.USER, "ann", 4, who="root")
        queue.set_limit(LimitKind.USER, "ann", 2, who="root")
        queue.set_limit(LimitKind.TAG, "*", 1, who="root")
        session.flush()
        assert [(row.kind, row.name, row.max_gpus) for row in queue.limits()] == [("tag", "*", 1), ("user", "ann", 2)]
        queue.remove_limit(LimitKind.TAG, "*", who="root")
        with pytest.raises(NotFound, match="no limit of tag sweep"):
            queue.remove_limit(LimitKind.TAG, "sweep", who="root")

        told = [event.why for event in EventRepository(session).after()]

    assert told == [
        "user ann may hold 4 GPUs",
        "user ann may hold 2 GPUs",
        "tag * may hold 1 GPU",
        "tag * has no limit",
    ]


def test_tags_are_read_for_the_named_ones_alone(database: Database) -> None:
    with database.write() as session:
        run, _ = RunRepository(session).create(RunSpec(tags=("sweep", "night")))
        queue = QueueRepository(session)

        assert queue.tags_of(["sweep"]) == {run.id: frozenset({"sweep"})}
        assert queue.tags_of(["*"]) == {run.id: frozenset({"sweep", "night"})}
