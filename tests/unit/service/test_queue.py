"""Pausing, draining and limiting the queue over HTTP."""

import time
from typing import Any

import httpx

from tests.unit.controller.fakes import FakeLauncher

ANN = {"Muonscope-User": "ann"}


def submit(client: httpx.Client, headers: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    response = client.post("/runs", json={"world_size": 1, **spec}, headers=headers or {})
    assert response.status_code == 201, response.text
    run: dict[str, Any] = response.json()
    return run


def wait_for(client: httpx.Client, run_id: str, field: str, value: Any) -> None:
    deadline = time.monotonic() + 60
    while (found := client.get(f"/runs/{run_id}").json()[field]) != value:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_a_paused_queue_takes_runs_says_why_they_wait_and_starts_them_when_resumed(
    client: httpx.Client, launcher: FakeLauncher
) -> None:
    paused = client.post("/queue/pause", json={"why": "new disks"}, headers=ANN).json()
    run = submit(client)

    wait_for(client, run["id"], "waiting_reason", "the queue is paused, by ann: new disks")
    assert (paused["mode"], paused["who"], paused["why"]) == ("paused", "ann", "new disks")
    assert client.get("/queue").json()["waiting"] == 1
    assert launcher.requests == {}

    assert client.post("/queue/resume").json()["mode"] == "open"
    wait_for(client, run["id"], "status", "pending")


def test_a_draining_queue_refuses_submissions_and_says_when_it_is_drained(client: httpx.Client) -> None:
    run = submit(client)
    wait_for(client, run["id"], "status", "pending")

    draining = client.post("/queue/drain", json={"why": "upgrade"}, headers=ANN).json()
    refused = client.post("/runs", json={})

    assert (draining["mode"], draining["holding"], draining["is_drained"]) == ("draining", 1, False)
    assert refused.status_code == 503
    assert refused.headers["Retry-After"]
    assert refused.json()["detail"] == "the queue is draining, by ann: upgrade"
    assert "muonscope queue resume" in refused.json()["remedy"]
    assert client.post(f"/runs/{run['id']}/stop").status_code == 202


def test_a_users_limit_is_kept_and_shown(client: httpx.Client) -> None:
    shown = client.put("/queue/limits/user/ann", json={"max_gpus": 1}, headers={"Muonscope-User": "root"}).json()
    first, second = submit(client, ANN), submit(client, ANN)
    other = submit(client, {"Muonscope-User": "bob"})

    wait_for(client, other["id"], "status", "pending")
    wait_for(client, first["id"], "status", "pending")
    wait_for(client, second["id"], "waiting_reason", "needs 1 GPU, ann holds 1 of at most 1")
    assert second["submitted_by"] == "ann"
    assert [(row["kind"], row["name"], row["max_gpus"], row["who"]) for row in shown["limits"]] == [
        ("user", "ann", 1.0, "root")
    ]
    assert client.delete("/queue/limits/user/ann").json()["limits"] == []


def test_a_limit_that_is_none_is_refused_with_its_field(client: httpx.Client) -> None:
    negative = client.put("/queue/limits/user/ann", json={"max_gpus": -1})
    unknown = client.delete("/queue/limits/tag/a%2Fb")

    assert (negative.status_code, negative.json()["field"]) == (422, "max_gpus")
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "there is no limit of tag a/b")


def test_who_submitted_and_who_stopped_a_run_is_in_its_events(client: httpx.Client) -> None:
    run = submit(client, ANN)
    client.post(f"/runs/{run['id']}/stop", headers={"Muonscope-User": "bob\x07"})

    events = client.get(f"/runs/{run['id']}/events").json()["events"]
    told = {(event["who"], event["to_status"] or event["kind"]) for event in events}
    assert ("ann", "queued") in told
    assert told & {("bob", "stopped"), ("bob", "stop_requested")}
