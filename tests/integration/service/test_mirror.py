"""Runs carried to another tracker: all of them, in pieces, and never at the cost of a run."""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from muonscope.contract.status import AttemptStatus, RunStatus
from muonscope.contract.telemetry import SCALARS, StepRecord
from service.controller.mirror import Measured, Mirror, TrackingAway, TrackingRefused, flattened
from service.controller.transitions import LEGAL
from service.settings import Settings
from service.store.retention import Retention
from service.store.runs import RunRepository
from service.store.session import Database
from tests.databases import database, postgres_template, postgres_url, sqlite_database, sqlite_template
from tests.records import end_attempt, insert, queue_run, start_attempt, started, step_record

__all__ = ["database", "postgres_template", "postgres_url", "sqlite_database", "sqlite_template"]

NAN, INF = math.nan, math.inf


class FakeTracking:
    """A tracker in memory, which a test can take away."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.params: dict[str, Mapping[str, str]] = {}
        self.metrics: dict[str, list[Measured]] = {}
        self.tags: dict[str, Mapping[str, str]] = {}
        self.statuses: dict[str, tuple[RunStatus, bool]] = {}
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None

    def open_run(self, uid: str, name: str, *, started_ms: int, params: Mapping[str, str]) -> str:
        self.before(uid)
        assert started_ms > 1e12
        remote_id = f"remote-{uid}"
        self.names[remote_id], self.params[remote_id] = name, params
        self.metrics.setdefault(remote_id, [])
        return remote_id

    def log(self, remote_id: str, metrics: Sequence[Measured]) -> None:
        self.before(remote_id)
        assert len(metrics) <= 1000
        self.metrics[remote_id] += metrics
        self.after(remote_id)

    def set_tags(self, remote_id: str, tags: Mapping[str, str]) -> None:
        self.before(remote_id)
        self.tags[remote_id] = tags

    def set_status(self, remote_id: str, status: RunStatus, *, ended_ms: int | None) -> None:
        self.statuses[remote_id] = (status, ended_ms is not None)

    def series(self, uid: str, key: str) -> list[tuple[int, float]]:
        return [(it.step, it.value) for it in self.metrics[f"remote-{uid}"] if it.key == key]


@pytest.fixture
def tracking() -> FakeTracking:
    return FakeTracking()


def _mirror(database: Database, tracking: FakeTracking, *, target: str = "one", is_leading: bool = True) -> Mirror:
    return Mirror(database, lambda: tracking, target=target, is_leading=lambda: is_leading)


def _set_status(database: Database, uid: str, *statuses: RunStatus) -> None:
    with database.write() as session:
        runs = RunRepository(session)
        for status in statuses:
            runs.set_status(runs.get(uid), status, legal=LEGAL, who="test", why="test")


def _ended(database: Database, records: Sequence[StepRecord]) -> str:
    uid, attempt_id = started(database, name="a run", tags=["night", "long"])
    insert(database, attempt_id, records)
    end_attempt(database, attempt_id, AttemptStatus.SUCCEEDED)
    _set_status(database, uid, RunStatus.RUNNING, RunStatus.SUCCEEDED)
    return uid


def test_an_ended_run_is_carried_over_with_every_value_that_was_measured(
    database: Database, tracking: FakeTracking
) -> None:
    odd = [NAN, INF, -INF, None, 0.5]
    uid = _ended(database, [step_record(step, loss=odd[step % 5], tokens=None) for step in range(200)])
    queue_run(database)

    assert _mirror(database, tracking).carry()

    losses = tracking.series(uid, "loss")
    assert [step for step, _ in losses] == [step for step in range(200) if step % 5 != 3]
    assert all(repr(value) == repr(odd[step % 5]) for step, value in losses)
    for name in (*SCALARS, "overflow", "discarded", "largest_parameter", "nonfinite_parameters", "ns_calls"):
        assert len(tracking.series(uid, name)) == (160 if name == "loss" else 200), name
    assert tracking.series(uid, "tokens") == []
    remote_id = f"remote-{uid}"
    assert list(tracking.names.items()) == [(remote_id, "a run")]
    assert tracking.params[remote_id]["step_ordering"] == "ordered"
    assert tracking.params[remote_id]["task.name"] == "simple_model"
    assert tracking.tags[remote_id]["muonscope.status"] == "succeeded"
    assert tracking.tags[remote_id]["muonscope.tags"] == "night, long"
    assert tracking.statuses[remote_id] == (RunStatus.SUCCEEDED, True)


def test_the_verdict_goes_along(sqlite_database: Database, tracking: FakeTracking) -> None:
    uid = _ended(sqlite_database, [step_record(0)])
    with sqlite_database.write() as session:
        run = RunRepository(session).get(uid)
        run.verdict, run.verdict_step, run.verdict_evidence = "dies", 17, "the scale was spent"  # type: ignore[assignment]

    _mirror(sqlite_database, tracking).carry()

    tags = tracking.tags[f"remote-{uid}"]
    assert tags["muonscope.verdict"] == "dies"
    assert tags["muonscope.verdict_step"] == "17"
    assert tags["muonscope.verdict_evidence"] == "the scale was spent"


def test_a_live_run_is_carried_over_as_it_grows_and_each_step_once(database: Database, tracking: FakeTracking) -> None:
    uid, attempt_id = started(database)
    for first in range(0, 300, 100):
        insert(database, attempt_id, [step_record(step) for step in range(first, first + 100)])
        # A controller of its own each time, as after a restart: the cursor is in the store.
        assert _mirror(database, tracking).carry()
        assert [step for step, _ in tracking.series(uid, "loss")] == list(range(first + 100))

    before = sum(map(len, tracking.metrics.values()))
    assert _mirror(database, tracking).carry()
    assert sum(map(len, tracking.metrics.values())) == before
    assert tracking.statuses[f"remote-{uid}"][1] is False


def test_a_resumed_run_is_carried_over_attempt_by_attempt(sqlite_database: Database, tracking: FakeTracking) -> None:
    uid, first = started(sqlite_database)
    insert(sqlite_database, first, [step_record(step, loss=1.0) for step in range(100)])
    end_attempt(sqlite_database, first)
    second = start_attempt(sqlite_database, uid, first_step=50)
    insert(sqlite_database, second, [step_record(step, loss=2.0) for step in range(50, 150)])

    _mirror(sqlite_database, tracking).carry()

    expected = [(step, 1.0) for step in range(100)] + [(step, 2.0) for step in range(50, 150)]
    assert tracking.series(uid, "loss") == expected


def _away(_: str) -> None:
    raise TrackingAway("connection refused")


def test_a_tracker_that_is_away_misses_nothing_once_it_is_back(
    sqlite_database: Database, tracking: FakeTracking, caplog: pytest.LogCaptureFixture
) -> None:
    uid = _ended(sqlite_database, [step_record(step) for step in range(200)])
    mirror, calls = _mirror(sqlite_database, tracking), []

    def fail_third(remote_id: str) -> None:
        calls.append(remote_id)
        if len(calls) >= 3:
            _away(remote_id)

    tracking.before = fail_third
    assert [mirror.carry() for _ in range(3)] == [False, False, False]
    assert 0 < len(tracking.series(uid, "loss")) < 200
    assert [record.getMessage() for record in caplog.records] == ["the mirror waits: connection refused"]

    tracking.before = lambda _: None
    assert mirror.carry()
    assert [step for step, _ in tracking.series(uid, "loss")] == list(range(200))
    with sqlite_database.read() as session:
        assert RunRepository(session).get(uid).summary.steps == 200


def test_a_piece_that_was_taken_and_not_noted_is_sent_again_the_same(
    sqlite_database: Database, tracking: FakeTracking
) -> None:
    uid = _ended(sqlite_database, [step_record(step, loss=step / 7) for step in range(100)])
    tracking.after = _away
    _mirror(sqlite_database, tracking).carry()
    tracking.after = lambda _: None
    _mirror(sqlite_database, tracking).carry()

    sent = tracking.metrics[f"remote-{uid}"]
    once = {(it.key, it.step, it.timestamp_ms, it.value) for it in sent}
    assert len(sent) > len(once)
    assert len([it for it in once if it[0] == "loss"]) == 100
    # No more than the one piece of at most 1000 values.
    assert len(sent) - len(once) <= 1000


def test_a_tracker_that_hangs_holds_up_no_writer_and_no_end(sqlite_database: Database, tracking: FakeTracking) -> None:
    hangs, release = threading.Event(), threading.Event()

    def hang(_: str) -> None:
        hangs.set()
        release.wait(60)

    tracking.before = hang
    uid, attempt_id = started(sqlite_database)
    insert(sqlite_database, attempt_id, [step_record(0)])
    mirror = _mirror(sqlite_database, tracking)
    working = threading.Thread(target=mirror.carry)
    working.start()
    assert hangs.wait(30)

    # With a transaction open these would wait for it, and be refused.
    insert(sqlite_database, attempt_id, [step_record(step) for step in range(1, 50)])
    end_attempt(sqlite_database, attempt_id, AttemptStatus.SUCCEEDED)
    _set_status(sqlite_database, uid, RunStatus.RUNNING, RunStatus.SUCCEEDED)
    assert tracking.metrics == {}

    release.set()
    working.join()
    assert mirror.carry()
    assert len(tracking.series(uid, "loss")) == 50
    assert tracking.statuses[f"remote-{uid}"] == (RunStatus.SUCCEEDED, True)


def test_the_service_ends_though_the_tracker_hangs(
    sqlite_database: Database, tracking: FakeTracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.controller.mirror._LOOK_S", 0.01)
    monkeypatch.setattr("service.controller.mirror._STOP_S", 0.2)
    hangs, release = threading.Event(), threading.Event()

    def hang(_: str) -> None:
        hangs.set()
        release.wait(60)

    tracking.before = hang
    _ended(sqlite_database, [step_record(0)])
    mirror = _mirror(sqlite_database, tracking)
    mirror.start()
    assert hangs.wait(30)

    asyncio.run(mirror.stop())

    assert mirror._thread.is_alive()
    release.set()
    mirror._thread.join()


def test_a_mirror_works_by_itself_while_it_leads(
    sqlite_database: Database, tracking: FakeTracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.controller.mirror._LOOK_S", 0.01)
    uid = _ended(sqlite_database, [step_record(0)])
    asked, done = threading.Event(), threading.Event()
    standing_by = Mirror(sqlite_database, lambda: tracking, target="one", is_leading=lambda: bool(asked.set()))
    standing_by.start()
    assert asked.wait(30)
    asyncio.run(standing_by.stop())
    assert tracking.metrics == {}

    tracking.after = lambda _: done.set()
    leading = _mirror(sqlite_database, tracking)
    leading.start()
    assert done.wait(30)
    asyncio.run(leading.stop())
    assert tracking.series(uid, "loss") == [(0, 2.0)]


def test_a_run_that_is_refused_holds_up_no_other(
    sqlite_database: Database, tracking: FakeTracking, caplog: pytest.LogCaptureFixture
) -> None:
    refused, other = (_ended(sqlite_database, [step_record(0)]) for _ in range(2))

    def refuse(remote_id: str) -> None:
        if refused in remote_id:
            raise TrackingRefused("it was deleted")

    tracking.before = refuse
    mirror = _mirror(sqlite_database, tracking)

    assert [mirror.carry(), mirror.carry()] == [True, True]

    assert tracking.series(other, "loss") == [(0, 2.0)]
    assert [record.getMessage() for record in caplog.records] == [f"run {refused} is not mirrored: it was deleted"]


def test_another_tracker_gets_a_run_from_its_beginning(sqlite_database: Database, tracking: FakeTracking) -> None:
    uid = _ended(sqlite_database, [step_record(step) for step in range(5)])
    second = FakeTracking()
    _mirror(sqlite_database, tracking).carry()
    _mirror(sqlite_database, second, target="another").carry()

    assert len(tracking.series(uid, "loss")) == len(second.series(uid, "loss")) == 5


def test_a_run_that_is_deleted_meanwhile_is_forgotten(
    sqlite_database: Database, tracking: FakeTracking, tmp_path: Path
) -> None:
    uid = _ended(sqlite_database, [step_record(0)])
    tracking.after = lambda _: Retention(sqlite_database, tmp_path).delete(uid, who="test", why="test")

    assert _mirror(sqlite_database, tracking).carry()
    assert _mirror(sqlite_database, tracking).carry()


def test_a_spec_becomes_flat_parameters() -> None:
    spec = {"name": "a", "task": {"name": "b", "width": 3}, "tags": ["x"], "notes": None, "checkpoint": {}}

    assert dict(flattened(spec)) == {"name": "a", "task.name": "b", "task.width": "3", "tags": '["x"]'}


def test_a_mirror_without_mlflows_client_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.settings.find_spec", lambda _: None)
    with pytest.raises(ValidationError, match=r"muonscope\[mlflow\]"):
        Settings(mlflow_tracking_uri="http://127.0.0.1:5000")
    assert Settings(mlflow_tracking_uri="").mlflow_tracking_uri is None
