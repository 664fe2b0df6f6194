"""The workers' door: who may speak, what is stored, and what becomes of the run."""

from typing import Any

import httpx
import pytest

from muonscope.contract.status import AttemptStatus, RunStatus
from muonscope.contract.telemetry import encode_batch
from service.controller.transitions import LEGAL
from service.store.attempts import AttemptRepository
from service.store.checkpoints import CheckpointRepository
from service.store.events import EventRepository
from service.store.runs import RunRepository
from service.store.session import Database
from tests.integration.api_telemetry.application import FakeController, application, served
from tests.integration.api_telemetry.workers import NAN, PARAMETERS, Workers, die, next_workers, train, workers
from tests.records import ENROLMENT_TOKEN, body_of, discarded_record, end_attempt, norms, queue_run, spec, step_record


def _alarms(database: Database) -> list[str]:
    with database.read() as session:
        return [event.why for event in EventRepository(session).after() if event.kind == "alarm"]


def _pending_attempt(database: Database) -> str:
    run_id = queue_run(database, spec(steps=30))
    with database.write() as session:
        runs = RunRepository(session)
        runs.set_status(runs.get(run_id), RunStatus.PENDING, legal=LEGAL, who="t", why="t")
        attempt = AttemptRepository(session).create(
            runs.get(run_id), enrolment_token=ENROLMENT_TOKEN, lease_s=30, first_step=5
        )
        return attempt.submission_id


def test_enrolment_gives_the_spec_and_a_token_that_works(client: httpx.Client, sqlite_database: Database) -> None:
    attempt_id = _pending_attempt(sqlite_database)
    enrolled = client.post(f"/attempts/{attempt_id}/enrol", json={"token": ENROLMENT_TOKEN, "ray_job_id": "01"})

    answer = enrolled.json()
    assert enrolled.status_code == 200
    assert (answer["attempt"], answer["epoch"], answer["resume_step"]) == (1, 1, 5)
    assert answer["spec"]["steps"] == 30
    voice = Workers(client, answer["run_id"], attempt_id, answer["token"])
    assert voice.post("heartbeat", {"status": "running"}).json() == {"stop_requested": False}
    assert "enrolled" in voice.run()["attempts"][0]["phases"]


def test_a_second_enrolment_is_refused_with_an_alarm_and_the_first_token_stays(
    client: httpx.Client, sqlite_database: Database
) -> None:
    attempt_id = _pending_attempt(sqlite_database)
    first = client.post(f"/attempts/{attempt_id}/enrol", json={"token": ENROLMENT_TOKEN}).json()
    second = client.post(f"/attempts/{attempt_id}/enrol", json={"token": ENROLMENT_TOKEN})

    assert second.status_code == 409
    assert second.headers["content-type"] == "application/problem+json"
    assert len(_alarms(sqlite_database)) == 1
    voice = Workers(client, first["run_id"], attempt_id, first["token"])
    assert voice.post("heartbeat", {"status": "running"}).status_code == 200


@pytest.mark.parametrize("message", ["facts", "steps", "heartbeat", "outcome"])
@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic attempt-secret", "attempt-secret"])
def test_no_message_is_taken_without_the_attempts_token(
    client: httpx.Client, sqlite_database: Database, message: str, header: str | None
) -> None:
    voice = workers(client, sqlite_database)
    bodies: dict[str, Any] = {
        "facts": {}, "heartbeat": {"status": "running"}, "outcome": {"status": "stopped", "declared_steps": 0},
    }  # fmt: skip
    content: dict[str, Any] = (
        {"content": body_of([step_record(0)])} if message == "steps" else {"json": bodies[message]}
    )
    headers = {} if header is None else {"Authorization": header}
    answer = client.post(f"/attempts/{voice.attempt_id}/{message}", headers=headers, **content)

    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert voice.run()["summary"]["steps"] == 0


def test_an_unknown_attempt_is_not_found(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.attempt_id = "run-none-a1"
    assert voice.steps([step_record(0)]).status_code == 404


def test_steps_are_stored_once_and_answered_with_the_next_one(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    batch = [step_record(step) for step in range(5)]

    assert voice.steps(batch).json() == {"stored": 5, "next_step": 5}
    assert voice.steps(batch).json() == {"stored": 5, "next_step": 5}
    assert voice.run()["summary"]["steps"] == 5
    assert _alarms(sqlite_database) == []


def test_a_changed_step_is_a_conflict_and_an_alarm(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.steps([step_record(0)])
    answer = voice.steps([step_record(0, loss=9.0)])

    assert answer.status_code == 409
    assert (answer.json()["field"], answer.json()["value"]) == ("step", 0)
    assert len(_alarms(sqlite_database)) == 1


def test_a_superseded_attempt_writes_nothing_more(client: httpx.Client, sqlite_database: Database) -> None:
    first = workers(client, sqlite_database)
    first.steps([step_record(0)])
    end_attempt(sqlite_database, first.attempt_id, AttemptStatus.LOST)
    second = next_workers(first, sqlite_database)

    for message, body in (("heartbeat", {"status": "running"}), ("facts", {}), ("steps", body_of([step_record(1)]))):
        assert first.post(message, body).status_code == 409
    assert first.outcome("succeeded", 1).status_code == 409
    assert second.steps([step_record(1)]).status_code == 200
    stale = Workers(client, second.run_id, second.attempt_id, epoch=1)
    assert stale.steps([step_record(2)]).status_code == 409


@pytest.mark.parametrize(
    "body",
    [b"", b"MSCB", b"not a batch", body_of([step_record(0)])[:-4],
     body_of([step_record(0)]).replace(b'"schema_version":1', b'"schema_version":9')],
)  # fmt: skip
def test_a_body_that_is_no_batch_is_refused_with_a_remedy(
    client: httpx.Client, sqlite_database: Database, body: bytes
) -> None:
    voice = workers(client, sqlite_database)
    answer = voice.post("steps", body)

    assert (answer.status_code, answer.json()["field"]) == (400, "body")
    assert answer.json()["remedy"]
    assert voice.run()["summary"]["steps"] == 0


def test_a_batch_larger_than_the_limit_is_refused(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    answer = voice.post("steps", b"x" * (1024 * 1024 + 1))

    assert answer.status_code == 413
    assert answer.json()["remedy"]


@pytest.mark.parametrize(
    ("records", "rank", "field"), [([step_record(1000)], 0, "step"), ([step_record(0)], 5, "rank")]
)
def test_a_step_or_rank_that_cannot_be_is_named(
    client: httpx.Client, sqlite_database: Database, records: list[Any], rank: int, field: str
) -> None:
    answer = workers(client, sqlite_database).steps(records, rank=rank)

    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert answer.json()["remedy"]


def test_an_empty_batch_is_fine(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    assert voice.post("steps", encode_batch([], epoch=1)).json() == {"stored": 0, "next_step": 0}


@pytest.mark.parametrize(
    ("message", "body"),
    [("heartbeat", {"status": "running"}), ("facts", {"phases": {"first_step": 12.5}})],
)
def test_the_first_sign_of_training_sets_attempt_and_run_running(
    client: httpx.Client, sqlite_database: Database, controller: FakeController, message: str, body: dict[str, Any]
) -> None:
    voice = workers(client, sqlite_database)
    for _ in range(2):
        assert voice.post(message, body).is_success

    run = voice.run()
    assert (run["status"], run["attempts"][0]["status"]) == ("running", "running")
    assert run["started_at"] is not None


def test_a_heartbeat_brings_the_request_to_stop(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    client.post(f"/runs/{voice.run_id}/stop")

    assert voice.post("heartbeat", {"status": "pending"}).json() == {"stop_requested": True}


def test_a_complete_run_succeeds_and_trains(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    voice = workers(client, sqlite_database, steps=30)
    train(voice)

    run = voice.run()
    assert (run["status"], run["verdict"]["name"], run["failure"]) == ("succeeded", "trains", None)
    assert run["summary"]["parameters_moved"] == run["summary"]["parameters_total"] == 2
    assert run["summary"]["max_weight_motion"] == 0.45
    assert controller.wakes == 1


def test_a_success_with_a_step_missing_is_a_failure(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database, steps=30)
    voice.steps([step_record(step) for step in range(30) if step != 11])
    voice.outcome("succeeded", 30)

    run = voice.run()
    assert (run["status"], run["failure"]["kind"]) == ("failed", "record_incomplete")
    assert "30 steps and 29 are stored" in run["failure"]["message"]
    assert run["verdict"]["name"] == "inconclusive"


def test_a_success_that_declares_less_than_is_stored_is_a_failure_too(
    client: httpx.Client, sqlite_database: Database
) -> None:
    voice = workers(client, sqlite_database, steps=30)
    voice.steps([step_record(step) for step in range(30)])
    voice.outcome("succeeded", 29)

    assert voice.run()["failure"]["kind"] == "record_incomplete"


def test_a_run_that_dies_says_at_which_step_and_is_not_retried(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 3
    voice = workers(client, sqlite_database, steps=30, step_ordering="master")
    die(voice)

    run = voice.run()
    assert (run["status"], run["failure"]["kind"]) == ("failed", "loss_scale_exhausted")
    assert (run["verdict"]["name"], run["verdict"]["step"]) == ("dies", 17)
    assert [finding["name"] for finding in run["findings"]] == ["dies", "poisoned", "stalled"]
    assert run["findings"][1] | {"evidence": ""} == {
        "name": "poisoned", "step": 0, "parameter": "layers.0.weight", "evidence": "",
    }  # fmt: skip
    assert (run["summary"]["overflows"], run["summary"]["final_loss_scale"]) == (17, 1.0)
    assert run["summary"]["momentum_finite"] is False


def test_what_a_lost_attempt_recorded_beyond_the_last_ones_end_is_no_evidence(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 2
    first = workers(client, sqlite_database)
    first.steps([step_record(step, momentum_norm=NAN if step > 8 else 0.5) for step in range(20)])
    first.outcome("failed", 20, failure={"kind": "worker_died", "message": "a node is gone"})
    second = next_workers(first, sqlite_database, first_step=5)
    second.steps([discarded_record(step, loss_scale_after=2.0 ** (7 - step)) for step in (5, 6, 7)])
    second.outcome("failed", 3, failure={"kind": "loss_scale_exhausted", "step": 8, "message": "at its minimum"})

    verdict, *others = second.run()["findings"]

    assert (verdict["name"], verdict["step"]) == ("dies", 8)
    assert "at its minimum of 1, after 3 discarded steps in a row" in verdict["evidence"]
    assert "poisoned" not in {finding["name"] for finding in others}


def test_an_infrastructure_fault_queues_the_run_again_and_the_last_one_ends_it(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 2
    first = workers(client, sqlite_database, steps=30)
    first.steps([step_record(0)])
    failure = {"kind": "worker_died", "rank": 1, "message": "SIGKILL"}
    first.outcome("failed", 1, failure=failure)
    queued = first.run()
    second = next_workers(first, sqlite_database)
    second.outcome("failed", 0, failure=failure)
    ended = second.run()

    assert (queued["status"], queued["failure"], queued["verdict"]) == ("queued", None, None)
    assert queued["attempts"][0]["failure"]["kind"] == "worker_died"
    assert (ended["status"], ended["failure"]["rank"], ended["verdict"]["name"]) == ("failed", 1, "inconclusive")


def test_what_an_earlier_attempt_measured_at_its_end_is_not_told_of_the_next_one(
    client: httpx.Client, sqlite_database: Database
) -> None:
    dead = workers(client, sqlite_database, steps=30, step_ordering="master")
    die(dead)
    before = dead.run()["summary"]
    client.post(f"/runs/{dead.run_id}/retry")
    again = next_workers(dead, sqlite_database)
    again.outcome("failed", 0, failure={"kind": "setup_failed", "message": "no room"})

    after = again.run()["summary"]

    names = ("parameters_moved", "parameters_total", "max_weight_motion")
    assert [before[name] for name in names] == [0, 2, 0.0]
    assert [after[name] for name in names] == [None, None, None]


def test_a_stopped_run_keeps_what_it_recorded(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database, steps=30)
    voice.steps([step_record(0), discarded_record(1, parameter_norms=step_record(1).parameter_norms)])
    client.post(f"/runs/{voice.run_id}/stop")
    voice.outcome("stopped", 2)

    run = voice.run()
    assert (run["status"], run["verdict"]["name"], run["summary"]["steps"]) == ("stopped", "inconclusive", 2)


def test_a_run_stopped_while_it_waits_for_its_next_attempt_has_the_verdict_of_its_record(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 2
    voice = workers(client, sqlite_database)
    voice.post("facts", {"parameters": PARAMETERS, "phases": {"first_step": 1.0}})
    voice.steps([discarded_record(0, momentum_norm=NAN, parameter_norms=norms(NAN, 0.0))])
    voice.outcome("failed", 1, failure={"kind": "worker_died", "message": "its node is gone"})
    assert voice.run()["status"] == "queued"

    stopped = client.post(f"/runs/{voice.run_id}/stop").json()

    assert (stopped["status"], stopped["verdict"]["name"]) == ("stopped", "poisoned")
    # Counter-test: one that was never started proves nothing.
    fresh = client.post("/runs", json={}).json()["id"]
    assert client.post(f"/runs/{fresh}/stop").json()["verdict"] is None


def test_a_run_that_fails_while_it_is_stopped_is_stopped(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 3
    voice = workers(client, sqlite_database)
    client.post(f"/runs/{voice.run_id}/stop")
    voice.outcome("failed", 0, failure={"kind": "worker_died"})

    assert voice.run()["status"] == "stopped"


def test_an_outcome_is_taken_once(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database, steps=30)
    train(voice)

    assert voice.outcome("failed", 0, failure={"kind": "task_error"}).status_code == 409
    assert voice.steps([step_record(29)]).status_code == 409
    assert voice.run()["status"] == "succeeded"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"status": "running", "declared_steps": 0}, "status"),
        ({"status": "lost", "declared_steps": 0}, "status"),
        ({"status": "failed", "declared_steps": 0}, "failure"),
        ({"status": "stopped", "declared_steps": 2**64}, "declared_steps"),
        ({"status": "stopped"}, "declared_steps"),
        ({"status": "stopped", "declared_steps": 0, "extra": 1}, "extra"),
    ],
)
def test_an_outcome_that_is_none_is_refused(
    client: httpx.Client, sqlite_database: Database, body: dict[str, Any], field: str
) -> None:
    voice = workers(client, sqlite_database)
    answer = voice.post("outcome", body)

    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert voice.run()["status"] == "pending"


def test_parameters_come_with_the_facts(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.post("facts", {"parameters": PARAMETERS})

    assert client.get(f"/runs/{voice.run_id}/parameters").json() == {"parameters": PARAMETERS}


def test_a_model_of_many_experts_is_told_whole(sqlite_database: Database, controller: FakeController) -> None:
    # 48 layers of 64 experts, three matrices each: more than a mebibyte says of them.
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
             for layer in range(48) for expert in range(64) for part in ("gate", "up", "down")]  # fmt: skip
    described = [{"index": index, "name": name, "shape": [768, 2048], "route": "muon", "reason": "is a matrix"}
                 for index, name in enumerate(names)]  # fmt: skip
    app = application()
    app.state.database, app.state.controller = sqlite_database, controller

    with served(app) as client:
        voice = workers(client, sqlite_database)
        told = voice.post("facts", {"parameters": described, "phases": {"first_step": 1.0}})
        ended = voice.outcome("succeeded", 0, final={"parameter_motions": [0.1234567890123456] * 8 * len(names)})
        known = client.get(f"/runs/{voice.run_id}/parameters").json()["parameters"]

    assert (told.status_code, ended.status_code, len(known)) == (204, 204, len(names))


def test_a_checkpoint_that_is_reported_twice_is_kept_once(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    told = {"step": 10, "total_bytes": 1, "manifest_sha256": "0" * 64}

    answer = voice.post("checkpoints", {"checkpoints": [told, told]})

    assert answer.status_code == 204
    with sqlite_database.read() as session:
        run = RunRepository(session).get(voice.run_id)
        assert [row.step for row in CheckpointRepository(session).list(run)] == [10]
