"""A deleted run is gone, and its disk space with it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select, update

from service.controller.housekeeping import Housekeeper
from service.controller.leadership import Leadership
from service.settings import Settings
from service.store.events import EventRepository
from service.store.models import Base, Run
from service.store.retention import Retention
from service.store.session import Database
from tests.integration.api_telemetry.workers import Workers, train, workers
from tests.records import norms, step_record


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


def test_a_deleted_run_leaves_no_row_but_the_event_that_says_so(
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
    assert _rows(database) == {**one_run, "event": one_run["event"] + 1}
    assert before["step"] == 0
    assert not checkpoint.exists()
    assert not log.exists()
    with database.read() as session:
        event = EventRepository(session).after(0)[-1]
    assert (event.kind, event.detail) == ("run_deleted", {"run_id": voice.run_id, "name": "a run", "steps": 30})


def test_a_run_that_has_not_ended_stays(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.steps([step_record(0)])

    refused = client.delete(f"/runs/{voice.run_id}")

    assert (refused.status_code, refused.json()["field"]) == (409, "status")
    assert "stop it first" in refused.json()["remedy"]
    assert voice.run()["summary"]["steps"] == 1
    assert client.delete("/runs/none").status_code == 404


def test_sqlites_file_becomes_smaller(client: httpx.Client, sqlite_database: Database, home: Path) -> None:
    voice = workers(client, sqlite_database)
    for first in range(0, 900, 300):
        voice.steps([step_record(step, parameter_norms=norms(*[0.5] * 1000)) for step in range(first, first + 300)])
    assert voice.outcome("stopped", 900).status_code == 204
    path = sqlite_database.path
    assert path is not None
    retention = Retention(sqlite_database, home)
    retention.reclaim()
    before = path.stat().st_size

    retention.delete(voice.run_id, who="test", why="test")
    retention.reclaim()

    assert before > 3_600_000
    assert path.stat().st_size < before / 5


def test_runs_are_deleted_once_they_ended_long_enough_ago(
    any_client: httpx.Client, database: Database, home: Path
) -> None:
    old, young = _ended(any_client, database), _ended(any_client, database)
    live = workers(any_client, database)
    with database.write() as session:
        run = session.scalars(select(Run).where(Run.uid == old.run_id)).one()
        assert run.finished_at is not None
        session.execute(update(Run).where(Run.id == run.id).values(finished_at=run.finished_at - timedelta(days=31)))
    keeper = Housekeeper(database, Settings(home=home, retention_days=30), Leadership(database, "http://127.0.0.1:1"))

    assert keeper.tidy() == 1
    assert keeper.tidy() == 0
    found = {run["id"] for run in any_client.get("/runs").json()["runs"]}
    assert found == {young.run_id, live.run_id}
