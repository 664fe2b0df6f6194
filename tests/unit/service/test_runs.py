"""Submitting, reading and commanding runs."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from httpx import Client

from tests.unit.controller.fakes import FakeLauncher


def wait_for_status(client: Client, run_id: str, status: str, limit_s: float = 60.0) -> dict:  # type: ignore[type-arg]
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        run: dict = client.get(f"/runs/{run_id}").json()  # type: ignore[type-arg]
        if run["status"] == status:
            return run
        time.sleep(0.02)
    raise AssertionError(f"{run_id} is {run['status']}, not {status}: {run['waiting_reason']}")


def wait_for_job(launcher: FakeLauncher, name: str) -> None:
    """A run is pending before its job is sent: a controller that dies in between must know that it may have been."""
    deadline = time.monotonic() + 60
    while name not in launcher.rows:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_reason(client: Client, run_id: str, reason: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while (found := client.get(f"/runs/{run_id}").json()["waiting_reason"]) != reason:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def test_an_accepted_run_has_every_agreed_field(client: Client) -> None:
    response = client.post("/runs", json={"name": "first", "tags": ["a"], "steps": 3})
    run = response.json()
    assert response.status_code == 201
    assert response.headers["location"] == f"/runs/{run['id']}"
    assert set(run) >= {
        "id", "name", "spec", "fingerprint", "status", "waiting_reason", "queue_position", "failure", "verdict",
        "findings", "attempts", "summary", "experiment_id", "tags", "created_at", "started_at", "finished_at",
    }  # fmt: skip
    assert set(run["summary"]) >= {
        "steps", "applied", "discarded", "overflows", "final_loss_scale", "parameters_moved", "parameters_total",
        "momentum_finite", "max_weight_motion", "last_loss", "last_momentum_norm",
    }  # fmt: skip
    assert (run["status"], run["queue_position"]) == ("queued", 1)
    assert run["spec"]["steps"] == 3


def test_a_submitted_run_becomes_a_job(client: Client, launcher: FakeLauncher) -> None:
    run_id = client.post("/runs", json={}).json()["id"]
    run = wait_for_status(client, run_id, "pending")
    assert [(attempt["id"], attempt["ray_job"]) for attempt in run["attempts"]] == [(f"run-{run_id}-a1",) * 2]
    wait_for_job(launcher, f"run-{run_id}-a1")


def test_a_repeat_with_the_same_key_is_the_same_run(client: Client) -> None:
    first = client.post("/runs", json={"steps": 3}, headers={"Idempotency-Key": "k"})
    again = client.post("/runs", json={"steps": 3}, headers={"Idempotency-Key": "k"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    # Counter-test: without the key it is another run.
    assert client.post("/runs", json={"steps": 3}).json()["id"] != first.json()["id"]


def test_a_key_with_another_spec_is_refused(client: Client) -> None:
    client.post("/runs", json={"steps": 3}, headers={"Idempotency-Key": "k"})
    other = client.post("/runs", json={"steps": 4}, headers={"Idempotency-Key": "k"})
    assert other.status_code == 409
    assert other.json()["field"] == "Idempotency-Key"
    assert len(client.get("/runs").json()["runs"]) == 1


def test_a_valid_spec_is_said_to_be_and_nothing_is_queued(client: Client) -> None:
    spec = {
        "name": "first",
        "steps": 3,
        "implementation": "deepspeed",
        "step_ordering": "master",
        "gradient_clipping": 1.0,
    }
    answer = client.post("/runs/validate", json=spec)
    assert answer.status_code == 200
    assert client.get("/runs").json()["runs"] == []
    accepted = client.post("/runs", json=spec).json()
    assert answer.json() == {"spec": accepted["spec"], "fingerprint": accepted["fingerprint"]}


@pytest.mark.parametrize(
    "spec",
    [
        {"steps": 0},
        {"stepz": 3},
        {"world_size": 64},
        {"implementation": "deepspeed", "step_ordering": "ordered"},
        {"task": {"name": "module:function"}},
    ],
)
def test_validation_refuses_what_submission_refuses_in_the_same_words(shared: Client, spec: dict[str, object]) -> None:
    shared.get("/readyz")  # the cluster is known: what is too large for it is refused
    validated, submitted = (shared.post(path, json=spec) for path in ("/runs/validate", "/runs"))
    assert (validated.status_code, validated.json()) == (submitted.status_code, submitted.json())
    assert validated.status_code == 422


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_an_unusable_key_is_refused(shared: Client, key: str) -> None:
    assert shared.post("/runs", json={}, headers={"Idempotency-Key": key}).status_code == 422


def test_twenty_parallel_repeats_make_one_run(client: Client) -> None:
    def post(_: int) -> tuple[int, str]:
        response = client.post("/runs", json={"steps": 3}, headers={"Idempotency-Key": "k"})
        return response.status_code, response.json()["id"]

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert sorted(status for status, _ in answers) == [200] * 19 + [201]
    assert len({run_id for _, run_id in answers}) == 1
    assert len(client.get("/runs").json()["runs"]) == 1


def test_a_run_larger_than_the_cluster_is_refused_and_half_gpus_count_half(client: Client) -> None:
    assert client.get("/readyz").status_code == 200
    refused = client.post("/runs", json={"world_size": 5, "resources": {"gpus_per_rank": 0.5}})
    assert refused.json()["remedy"] == "use at most 4"
    accepted = client.post("/runs", json={"world_size": 4, "resources": {"gpus_per_rank": 0.5}})
    assert accepted.status_code == 201


def test_a_run_submitted_before_the_first_worker_has_joined_waits_for_it(
    make_client: Callable[..., Client], launcher: FakeLauncher
) -> None:
    launcher.gpus = 0.0
    client = make_client()

    submitted = client.post("/runs", json={"world_size": 2})

    assert submitted.status_code == 201, submitted.text
    run_id = submitted.json()["id"]
    wait_for_reason(client, run_id, "needs 2 GPUs, the cluster has none yet")
    launcher.gpus = 2.0
    wait_for_status(client, run_id, "pending")


def test_a_run_within_what_the_cluster_may_come_to_have_waits_and_a_larger_one_is_refused(
    make_client: Callable[..., Client],
) -> None:
    client = make_client(cluster_max_gpus=4)

    submitted = client.post("/runs", json={"world_size": 4})
    refused = client.post("/runs", json={"world_size": 5})

    assert submitted.status_code == 201, submitted.text
    wait_for_reason(client, submitted.json()["id"], "needs 4 GPUs, the cluster has 2")
    assert refused.status_code == 422
    assert "needs 5 GPUs; the cluster may come to have 4" in refused.json()["detail"]
    assert refused.json()["remedy"] == "use at most 4"


def test_an_allow_listed_task_is_accepted(make_client: Callable[..., Client]) -> None:
    client = make_client(allow_tasks="mine.tasks:train")
    assert client.post("/runs", json={"task": {"name": "mine.tasks:train"}}).status_code == 201
    assert client.post("/runs", json={"task": {"name": "os:system"}}).status_code == 422


def test_pages_follow_each_other_without_gap_or_repeat(client: Client) -> None:
    made = [client.post("/runs", json={"name": f"run {index}"}).json()["id"] for index in range(5)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = client.get(f"/runs?limit=2&sort=created_at{cursor}").json()
        seen += [run["id"] for run in page["runs"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == made


def test_a_queued_run_stops_at_once(client: Client) -> None:
    first = client.post("/runs", json={"world_size": 2}).json()["id"]
    second = client.post("/runs", json={"world_size": 2}).json()["id"]
    wait_for_status(client, first, "pending")
    stopped = client.post(f"/runs/{second}/stop")
    assert stopped.status_code == 202
    assert stopped.json()["status"] == "stopped"


def test_a_live_run_is_told_to_stop_and_is_stopped_even_if_nobody_answers(
    make_client: Callable[..., Client], launcher: FakeLauncher
) -> None:
    client = make_client(stop_grace_s=0.3)
    run_id = client.post("/runs", json={}).json()["id"]
    wait_for_job(launcher, f"run-{run_id}-a1")
    assert client.post(f"/runs/{run_id}/stop").json()["stop_requested"] is True
    run = wait_for_status(client, run_id, "stopped")
    assert f"run-{run_id}-a1" in launcher.stopped
    assert run["attempts"][0]["status"] == "stopped"


def test_stopping_twice_is_fine_and_stopping_success_is_not(client: Client) -> None:
    run_id = client.post("/runs", json={"world_size": 2}).json()["id"]
    blocked = client.post("/runs", json={"world_size": 2}).json()["id"]
    assert client.post(f"/runs/{blocked}/stop").status_code == 202
    assert client.post(f"/runs/{blocked}/stop").status_code == 202
    assert client.post(f"/runs/{run_id}/retry").status_code == 409


def test_a_stopped_run_can_be_retried_under_its_id(client: Client) -> None:
    client.post("/runs", json={"world_size": 2})
    run_id = client.post("/runs", json={"world_size": 2}).json()["id"]
    client.post(f"/runs/{run_id}/stop")
    retried = client.post(f"/runs/{run_id}/retry").json()
    assert (retried["id"], retried["status"], retried["finished_at"]) == (run_id, "queued", None)


@pytest.mark.parametrize(("allowed", "status"), [("", 422), ("mine:task", 202)])
def test_a_retry_starts_no_task_that_submission_refuses(
    make_client: Callable[..., Client], allowed: str, status: int
) -> None:
    client = make_client(allow_tasks=allowed)
    ended = {"status": "failed", "declared_steps": 0, "failure": {"kind": "worker_died", "message": "gone"}}
    record = {"id": "elsewhere", "spec": {"task": {"name": "mine:task"}}, "facts": {}, "outcome": ended, "batches": []}
    brought = client.post("/imports/runs", json=record).json()["id"]

    answer = client.post(f"/runs/{brought}/retry")

    assert answer.status_code == status
    if status == 422:
        assert answer.json()["field"] == "task.name"
        assert client.get(f"/runs/{brought}").json()["status"] == "failed"


def test_a_clone_is_a_new_run_of_the_same_spec(client: Client) -> None:
    run = client.post("/runs", json={"steps": 7, "name": "to clone"}).json()
    clone = client.post(f"/runs/{run['id']}/clone")
    assert clone.status_code == 201
    assert clone.json()["id"] != run["id"]
    assert clone.json()["fingerprint"] == run["fingerprint"]


def test_the_log_of_the_newest_attempt_is_plain_text(client: Client, launcher: FakeLauncher) -> None:
    run_id = client.post("/runs", json={}).json()["id"]
    wait_for_job(launcher, f"run-{run_id}-a1")
    log = client.get(f"/runs/{run_id}/logs")
    assert log.headers["content-type"] == "text/plain; charset=utf-8"
    assert log.text == f"log of run-{run_id}-a1"
    assert client.get(f"/runs/{run_id}/logs?attempt=2").status_code == 404


def test_ray_is_not_asked_what_a_recorded_script_has_printed(client: Client, launcher: FakeLauncher) -> None:
    begun = client.post("/recordings", json={"spec": {"name": "mine", "task": {"name": "external"}}}).json()

    log = client.get(f"/runs/{begun['run_id']}/logs")

    # Ray, asked, would not know the job: that is a 404.
    assert (log.status_code, log.text) == (200, "")


def test_every_change_is_listed_as_an_event(client: Client) -> None:
    run_id = client.post("/runs", json={}).json()["id"]
    wait_for_status(client, run_id, "pending")
    events = client.get(f"/runs/{run_id}/events").json()["events"]
    assert [(event["kind"], event["to_status"], event["who"]) for event in events] == [
        ("run_status", "queued", "api"),
        ("attempt_status", "pending", "controller"),
        ("run_status", "pending", "controller"),
    ]
    later = client.get(f"/runs/{run_id}/events?after={events[0]['id']}").json()["events"]
    assert later == events[1:]


def test_the_cluster_shows_who_holds_its_gpus(client: Client) -> None:
    run_id = client.post("/runs", json={"world_size": 2}).json()["id"]
    client.post("/runs", json={"world_size": 2})
    wait_for_status(client, run_id, "pending")
    cluster = client.get("/cluster").json()
    assert (cluster["gpus"], cluster["gpus_held"], cluster["queued"], cluster["reachable"]) == (2.0, 2.0, 1, True)
    assert [holder["run_id"] for holder in cluster["holders"]] == [run_id]
    # Of a cluster that it has not started the service does not know what its GPUs are.
    assert cluster["gpus_are_logical"] is None


def test_readiness_follows_the_cluster_and_liveness_does_not(client: Client, launcher: FakeLauncher) -> None:
    assert client.get("/readyz").status_code == 200
    launcher.is_reachable = False
    deadline = time.monotonic() + 60
    while client.get("/readyz").status_code == 200 and time.monotonic() < deadline:
        client.post("/runs", json={})
        time.sleep(0.05)
    unready = client.get("/readyz")
    assert unready.status_code == 503
    assert unready.headers["retry-after"]
    assert client.get("/healthz").status_code == 200
    # Runs are taken all the same: they wait.
    assert client.post("/runs", json={}).status_code == 201


def test_the_root_leads_to_the_dashboard(shared: Client) -> None:
    answer = shared.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui/runs")
