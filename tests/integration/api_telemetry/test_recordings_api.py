"""Runs that the service does not start: recorded as they train, or brought in whole."""

import base64
from typing import Any

import httpx
import pytest

from muonscope.cli.record_files import read_record
from service.store.runs import RunRepository
from service.store.session import Database
from tests.integration.api_telemetry.application import FakeController
from tests.integration.api_telemetry.workers import Workers, next_workers, workers
from tests.records import body_of, discarded_record, step_record

EXTERNAL = {"name": "mine", "task": {"name": "external", "is_open_ended": True}, "steps": 1000}


def _begin(client: httpx.Client) -> Workers:
    answer = client.post("/recordings", json={"spec": EXTERNAL})
    assert answer.status_code == 201, answer.text
    begun = answer.json()
    return Workers(client, begun["run_id"], begun["attempt_id"], begun["token"], begun["epoch"])


def _record(**changes: Any) -> dict[str, Any]:
    batches = [
        base64.b64encode(body_of(records, epoch=0)).decode()
        for records in ([step_record(0), discarded_record(1)], [step_record(2)])
    ]
    final = {"parameters_moved": 4, "parameters_total": 4}
    outcome = {"status": "succeeded", "declared_steps": 3, "final": final}
    return {"id": "abcdefghijkl", "spec": {"name": "elsewhere", "steps": 3}, "facts": {}, "outcome": outcome,
            "batches": batches, **changes}  # fmt: skip


def test_a_recorded_run_is_running_at_once_and_judged_by_what_came(
    any_client: httpx.Client, database: Database
) -> None:
    workers = _begin(any_client)
    while_it_runs = workers.run()
    workers.steps([step_record(0), step_record(1)])
    workers.outcome("succeeded", 2, final={"parameters_moved": 4, "parameters_total": 4})

    run = workers.run()
    assert (while_it_runs["status"], while_it_runs["queue_position"]) == ("running", None)
    assert (run["status"], run["verdict"]["name"], run["summary"]["steps"]) == ("succeeded", "trains", 2)
    assert run["verdict"]["evidence"].startswith("All 2 steps were attempted")


def test_a_recorded_run_names_no_ray_job(client: httpx.Client) -> None:
    workers = _begin(client)

    (attempt,) = workers.run()["attempts"]

    assert (attempt["id"], attempt["ray_job"]) == (workers.attempt_id, None)


def test_a_run_that_the_service_could_start_is_not_recorded(client: httpx.Client) -> None:
    refused = client.post("/recordings", json={"spec": {"name": "no script"}})

    assert refused.status_code == 422
    assert "POST /runs" in refused.json()["remedy"]


def test_a_live_recording_is_not_stopped_from_here(client: httpx.Client) -> None:
    workers = _begin(client)

    refused = client.post(f"/runs/{workers.run_id}/stop")

    assert refused.status_code == 409
    assert "end the script" in refused.json()["remedy"]
    assert client.get(f"/runs/{workers.run_id}").json()["stop_requested"] is False


def test_a_whole_run_is_imported_once(any_client: httpx.Client, database: Database) -> None:
    first = any_client.post("/imports/runs", json=_record())
    again = any_client.post("/imports/runs", json=_record())

    assert (first.status_code, again.status_code) == (201, 200), first.text
    assert first.json()["id"] == again.json()["id"]
    run = any_client.get(f"/runs/{first.json()['id']}").json()
    assert (run["status"], run["verdict"]["name"], run["summary"]["discarded"]) == ("succeeded", "trains", 1)
    assert len(any_client.get("/runs").json()["runs"]) == 1


def test_the_id_that_an_imported_record_had_elsewhere_names_its_run_here(client: httpx.Client) -> None:
    record = _record()
    before = client.get(f"/runs/{record['id']}").json()
    imported = client.post("/imports/runs", json=record).json()["id"]

    asked = client.get(f"/runs/{record['id']}/steps")

    assert asked.status_code == 404
    assert f"its record was imported as run {imported}" in asked.json()["detail"]
    assert asked.json()["remedy"] == f"ask for {imported}"
    assert "imported" not in before["detail"]


@pytest.mark.parametrize(
    "changes",
    [
        {"batches": ["no base64!"]},
        {"batches": [base64.b64encode(b"no batch").decode()]},
        {"outcome": {"status": "succeeded", "declared_steps": 4}},
    ],
)
def test_half_a_record_leaves_no_run(client: httpx.Client, changes: dict[str, Any]) -> None:
    assert client.post("/imports/runs", json=_record(**changes)).status_code in (400, 422)
    assert client.get("/runs").json()["runs"] == []


def test_a_resumed_run_comes_over_with_the_verdict_that_it_had(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 2
    first = workers(client, sqlite_database)
    first.post("facts", {"data_hash": "d"})
    first.steps([step_record(step) for step in range(20)])
    first.outcome("failed", 20, failure={"kind": "worker_died", "message": "a node is gone"})
    second = next_workers(first, sqlite_database, first_step=5)
    second.post("facts", {"data_hash": "d"})
    second.steps([discarded_record(step, loss_scale_after=2.0 ** (7 - step)) for step in (5, 6, 7)])
    second.outcome("failed", 3, failure={"kind": "loss_scale_exhausted", "step": 8, "message": "at its minimum"})
    with sqlite_database.read() as session:
        record = read_record(session, RunRepository(session).get(first.run_id))

    came = client.post("/imports/runs", json=record.model_dump(mode="json")).json()

    assert came["verdict"] == first.run()["verdict"]
    assert came["summary"]["steps"] == 8
