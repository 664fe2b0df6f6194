"""A record that was made elsewhere becomes a run that has ended, all at once or not at all."""

import base64

import httpx
import pytest

from service.store.session import Database
from tests.integration.api_telemetry.workers import NAN
from tests.records import body_of, discarded_record, step_record


def _import(client: httpx.Client, body: bytes, **params: str) -> httpx.Response:
    return client.post("/imports/steps", content=body, params={"name": "a log", **params})


def test_an_imported_record_is_a_run_with_its_steps_and_verdict(any_client: httpx.Client, database: Database) -> None:
    records = [step_record(3, loss=NAN), discarded_record(4), step_record(7)]

    answer = _import(any_client, body_of(records, epoch=0), source="from a folder")

    run = answer.json()
    assert answer.status_code == 201
    assert (run["status"], run["name"], run["tags"]) == ("succeeded", "a log", ["imported"])
    assert (run["summary"]["steps"], run["summary"]["discarded"]) == (3, 1)
    assert run["spec"]["notes"] == "from a folder"
    assert run["verdict"]["name"] == "diverged"
    steps = any_client.get(f"/runs/{run['id']}/steps").json()["steps"]
    assert [(step["step"], step["loss"]) for step in steps] == [(3, "NaN"), (4, 2.0), (7, 2.0)]


def test_the_rank_of_an_imported_batch_says_nothing(any_client: httpx.Client, database: Database) -> None:
    records = [step_record(step) for step in range(3)]
    body = body_of(records, epoch=7, rank=1)
    log = _import(any_client, body)
    ended = {"status": "succeeded", "declared_steps": 3}
    batches = [base64.b64encode(body).decode()]
    spec = {"name": "whole", "steps": 3, "world_size": 2}
    whole = any_client.post(
        "/imports/runs", json={"id": "there", "spec": spec, "facts": {}, "outcome": ended, "batches": batches}
    )

    for answer in (log, whole):
        assert answer.status_code == 201, answer.text
        assert (answer.json()["status"], answer.json()["summary"]["steps"]) == ("succeeded", 3)


def test_a_name_that_no_run_can_have_is_refused_in_plain_words(client: httpx.Client, sqlite_database: Database) -> None:
    refused = _import(client, body_of([step_record(0)]), name=" ").json()

    assert (refused["status"], refused["field"], refused["remedy"]) == (422, "name", "give the run a name")
    assert refused["detail"] == "name: must not be blank"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no batch", 400),
        (body_of([], epoch=0), 422),
        (body_of([step_record(1), step_record(0)], epoch=0), 422),
        (body_of([step_record(2**40)], epoch=0), 422),
    ],
)
def test_what_is_no_record_leaves_no_run(
    client: httpx.Client, sqlite_database: Database, body: bytes, status: int
) -> None:
    assert _import(client, body).status_code == status
    assert client.get("/runs").json()["runs"] == []
