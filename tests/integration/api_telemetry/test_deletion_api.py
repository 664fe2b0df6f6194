"""A deleted run is gone, and its disk space with it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select, update

from muonscope.contract.alerts import AlertRule
from service.controller.housekeeping import Housekeeper
from service.controller.leadership import Leadership
from service.errors import Unavailable
from service.settings import Settings
from service.store.alerts import AlertRepository
from service.store.events import EventRepository
from service.store.models import Base, Run
from service.store.retention import Retention
from service.store.runs import RunRepository
from service.store.session import Database
from service.store.types import read_clock
from tests.integration.api_telemetry.application import wait_for_the_rest
from tests.integration.api_telemetry.workers import Workers, train, workers
from tests.records import step_record


@pytest.fixture
def home(server: tuple[FastAPI, httpx.Client], tmp_path: Path) -> Any:
    """The service's home is the test's."""
    app, _ = server
    before = app.state.settings
    app.state.settings = before.model_copy(update={"home": tmp_path})
    yield tmp_path
    app.state.settings = before


def _rows(database: Database) -> dict[str, int]:
    with database.read() as session:
        return {
            table.name: session.execute(select(func.count()).select_from(table)).scalar_one()
            for table in Base.metadata.sorted_tables
        }


def _ended(client: httpx.Client, database: Database, steps: int = 30) -> Workers:
    voice = workers(client, database)
    voice.post("load", {"samples": [{"rank": 0, "at": 1.0}]})
    train(voice, steps)
    return voice


def _keeper(database: Database, home: Path) -> Housekeeper:
    return Housekeeper(database, Settings(home=home, retention_days=30), Leadership(database, "http://127.0.0.1:1"))


def test_a_deleted_run_leaves_no_row_but_the_event_and_audit_entry_that_say_so(
    any_client: httpx.Client, database: Database, home: Path
) -> None:
    before = _rows(database)
    kept = _ended(any_client, database)
    one_run = _rows(database)
    voice = _ended(any_client, database)
    checkpoint = home / "checkpoints" / voice.run_id / "step-1"
    log = home / "logs" / voice.attempt_id
    for folder in (checkpoint, log):
        folder.mkdir(parents=True)

    answer = any_client.delete(f"/runs/{voice.run_id}", headers={"Muonscope-User": "ada"})

    assert answer.status_code == 204
    assert any_client.get(f"/runs/{voice.run_id}").status_code == 404
    assert any_client.get(f"/runs/{kept.run_id}").json()["summary"]["steps"] == 30
    told = {"event": one_run["event"] + 1, "audit_entry": one_run["audit_entry"] + 1}
    assert _rows(database) == {**one_run, **told}
    assert before["step"] == 0
    assert not checkpoint.exists()
    assert not log.exists()
    with database.read() as session:
        event = EventRepository(session).after(0)[-1]
    assert (event.kind, event.detail) == ("run_deleted", {"run_id": voice.run_id, "name": "a run", "steps": 30})


@pytest.mark.parametrize("is_expired", [False, True], ids=["deleted", "kept no longer"])
def test_checkpoints_in_the_workers_shared_folder_go_with_their_run(
    server: tuple[FastAPI, httpx.Client], client: httpx.Client, sqlite_database: Database, home: Path, is_expired: bool
) -> None:
    shared = Settings(
        home=home / "service", workers_home=home / "shared", ray_address="http://head:8265", retention_days=1.0
    )
    server[0].state.settings = shared
    voice = _ended(client, sqlite_database)
    checkpoint = home / "shared" / "checkpoints" / voice.run_id / "step-1"
    checkpoint.mkdir(parents=True)

    if is_expired:
        with sqlite_database.write() as session:
            session.execute(update(Run).values(finished_at=read_clock(session) - timedelta(days=2)))
        Housekeeper(sqlite_database, shared, Leadership(sqlite_database, "http://127.0.0.1:1")).tidy()
    else:
        assert client.delete(f"/runs/{voice.run_id}").status_code == 204

    assert not checkpoint.exists()


def test_a_store_that_is_busy_after_the_answer_breaks_nothing(
    server: tuple[FastAPI, httpx.Client], client: httpx.Client, sqlite_database: Database, home: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def busy(_: Retention) -> None:
        raise Unavailable("the database cannot answer now")

    monkeypatch.setattr(Retention, "reclaim", busy)
    voice = _ended(client, sqlite_database)

    assert client.delete(f"/runs/{voice.run_id}").status_code == 204
    assert client.get("/runs").json()["runs"] == []
    wait_for_the_rest(server[0])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the disk space of deleted runs is not free yet: the database cannot answer now"
    ]
    assert [record.levelname for record in caplog.records if record.exc_info] == []


def test_a_postgresql_that_is_away_when_space_is_to_be_given_back_is_unavailable_and_no_error_of_ours(
    tmp_path: Path,
) -> None:
    absent = Database("postgresql://nobody@/none?host=/nonexistent")

    with pytest.raises(Unavailable, match="cannot answer now"):
        Retention(absent, tmp_path).reclaim()


def test_a_run_that_has_not_ended_stays(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.steps([step_record(0)])

    refused = client.delete(f"/runs/{voice.run_id}")

    assert (refused.status_code, refused.json()["field"]) == (409, "status")
    assert "stop it first" in refused.json()["remedy"]
    assert voice.run()["summary"]["steps"] == 1
    assert client.delete("/runs/none").status_code == 404


def _bytes_on_disk(database: Database) -> int:
    """SQLite's file with its log, PostgreSQL's tables with what they keep out of line and their indexes."""
    if database.path is not None:
        log = database.path.with_name(f"{database.path.name}-wal")
        return database.path.stat().st_size + (log.stat().st_size if log.exists() else 0)
    with database.read() as session:
        sizes = [
            session.execute(select(func.pg_total_relation_size(table.name))).scalar_one()
            for table in Base.metadata.sorted_tables
        ]
    return int(sum(sizes))


@pytest.mark.parametrize("is_expired", [False, True], ids=["deleted", "kept no longer"])
def test_a_large_run_that_goes_gives_its_bytes_back(
    server: tuple[FastAPI, httpx.Client], any_client: httpx.Client, database: Database, home: Path, is_expired: bool
) -> None:
    kept, voice = _ended(any_client, database), workers(any_client, database)
    Retention(database, home).reclaim()
    before = _bytes_on_disk(database)
    # Norms that differ: PostgreSQL packs what repeats.
    varied = np.random.default_rng(0).random((900, 1000), np.float32)
    for first in range(0, 900, 100):
        records = [step_record(step, parameter_norms=varied[step].tobytes()) for step in range(first, first + 100)]
        assert voice.steps(records).status_code == 200
    assert voice.outcome("stopped", 900).status_code == 204
    Retention(database, home).reclaim()
    grown = _bytes_on_disk(database) - before

    if is_expired:
        with database.write() as session:
            run = session.scalars(select(Run).where(Run.uid == voice.run_id)).one()
            assert run.finished_at is not None
            run.finished_at -= timedelta(days=31)
        assert _keeper(database, home).tidy() == 1
    else:
        assert any_client.delete(f"/runs/{voice.run_id}").status_code == 204
        # The answer comes before the space.
        wait_for_the_rest(server[0])

    assert grown > 3_600_000
    assert _bytes_on_disk(database) < before + grown / 5
    assert any_client.get(f"/runs/{kept.run_id}").json()["summary"]["steps"] == 30


def test_runs_are_deleted_once_they_ended_long_enough_ago(
    any_client: httpx.Client, database: Database, home: Path
) -> None:
    old, young = _ended(any_client, database), _ended(any_client, database)
    live = workers(any_client, database)
    with database.write() as session:
        run = session.scalars(select(Run).where(Run.uid == old.run_id)).one()
        assert run.finished_at is not None
        session.execute(update(Run).where(Run.id == run.id).values(finished_at=run.finished_at - timedelta(days=31)))
    keeper = _keeper(database, home)

    assert keeper.tidy() == 1
    assert keeper.tidy() == 0
    found = {run["id"] for run in any_client.get("/runs").json()["runs"]}
    assert found == {young.run_id, live.run_id}


def test_what_counts_on_revisions_misses_nothing_after_the_newest_run_is_gone(
    any_client: httpx.Client, database: Database, home: Path
) -> None:
    first, last = _ended(any_client, database), _ended(any_client, database)
    rule = AlertRule.model_validate(
        {"name": "r", "url": "https://example.org/", "when": {"kind": "discarded_share", "share": 0.5}}
    )
    with database.write() as session:
        seen = AlertRepository(session).create(rule, key_id="k", who="test").seen_revision

    any_client.delete(f"/runs/{last.run_id}")
    any_client.patch(f"/runs/{first.run_id}", json={"add_tags": ["later"]})
    with database.read() as session:
        changed = RunRepository(session).changed_after(seen)

    assert [run.uid for run in changed] == [first.run_id]
    any_client.delete(f"/runs/{first.run_id}")
    with database.read() as session:
        assert AlertRepository(session).list()[0].seen_revision == RunRepository(session).last_revision() == 0


def test_an_experiment_whose_runs_are_all_gone_does_not_wait_for_any(
    client: httpx.Client, sqlite_database: Database, home: Path
) -> None:
    asked = {"name": "gone", "base": {"steps": 2}, "matrix": {"seed": [1, 2]}}
    experiment = client.post("/experiments", json=asked).json()
    for run in experiment["runs"]:
        client.post(f"/runs/{run['id']}/stop")
        assert client.delete(f"/runs/{run['id']}").status_code == 204

    left = client.get(f"/experiments/{experiment['id']}").json()

    assert (experiment["status"], left["status"], left["runs"]) == ("queued", "succeeded", [])


@pytest.mark.parametrize("days", [float("inf"), 1e9, 1e6])
def test_runs_that_are_kept_longer_than_time_itself_are_never_deleted(
    sqlite_database: Database, home: Path, days: float
) -> None:
    assert Retention(sqlite_database, home).expired(days) == []
