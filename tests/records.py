"""Runs, attempts and step records for tests of the store and of what reads it."""

from array import array
from collections.abc import Sequence
from typing import Any

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, RunStatus
from muonscope.contract.telemetry import StepBatch, StepRecord, encode_batch, encode_record
from service.controller.transitions import LEGAL
from service.store.attempts import AttemptRepository
from service.store.models import Attempt, Run
from service.store.runs import RunRepository
from service.store.session import Database, Session
from service.store.steps import StepRepository, Stored

ENROLMENT_TOKEN = "enrolment-secret"
TOKEN = "attempt-secret"


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "a run", "steps": 1000, "world_size": 2, **changes})


def norms(*values: float) -> bytes:
    return array("f", values).tobytes()


def step_record(step: int, **changes: Any) -> StepRecord:
    """One plain, applied step."""
    values: dict[str, Any] = {
        "overflow": False, "discarded": False, "loss_scale_before": 65536.0, "loss_scale_after": 65536.0,
        "loss": 2.0, "lr": 0.02, "grad_norm": 1.0, "update_norm": 3.0, "momentum_norm": 0.5, "step_time_s": 0.01,
        "largest_parameter": 0, "nonfinite_parameters": 0, "ns_calls": 2, "tokens": 64,
        "parameter_norms": norms(0.3, 0.4),
    }  # fmt: skip
    return StepRecord(step, **{**values, **changes})


def discarded_record(step: int, **changes: Any) -> StepRecord:
    return step_record(step, **{"overflow": True, "discarded": True, "grad_norm": float("inf"), **changes})


def body_of(records: Sequence[StepRecord], *, epoch: int = 1, rank: int = 0) -> bytes:
    return encode_batch([encode_record(record) for record in records], epoch=epoch, rank=rank)


def queue_run(database: Database, run_spec: RunSpec | None = None) -> str:
    """Queue a run and return its id."""
    with database.write() as session:
        run, _ = RunRepository(session).create(run_spec or spec())
        return run.uid


def start_attempt(database: Database, uid: str, *, first_step: int = 0) -> str:
    """Begin the run's next attempt, enrolled with TOKEN, and return its submission id."""
    with database.write() as session:
        runs, attempts = RunRepository(session), AttemptRepository(session)
        run = runs.get(uid)
        if run.status is RunStatus.QUEUED:
            runs.set_status(run, RunStatus.PENDING, legal=LEGAL, who="test", why="test")
        attempt = attempts.create(run, enrolment_token=ENROLMENT_TOKEN, lease_s=30.0, first_step=first_step)
        attempts.enrol(attempt.submission_id, enrolment_token=ENROLMENT_TOKEN, token=TOKEN, lease_s=30.0)
        return attempt.submission_id


def end_attempt(database: Database, submission_id: str, status: AttemptStatus = AttemptStatus.FAILED) -> None:
    with database.write() as session:
        attempts = AttemptRepository(session)
        attempts.set_status(attempts.get(submission_id), status, who="test", why="test")


def insert(database: Database, submission_id: str, records: Sequence[StepRecord], *, rank: int = 0) -> Stored:
    with database.write(durable=False) as session:
        attempt = AttemptRepository(session).get(submission_id)
        return StepRepository(session).insert(attempt, StepBatch.of(records, epoch=attempt.epoch, rank=rank))


def started(database: Database, **changes: Any) -> tuple[str, str]:
    """Queue a run, begin its first attempt and return both ids."""
    uid = queue_run(database, spec(**changes))
    return uid, start_attempt(database, uid)


def get_run(session: Session, uid: str) -> Run:
    return RunRepository(session).get(uid)


def get_attempt(session: Session, submission_id: str) -> Attempt:
    return AttemptRepository(session).get(submission_id)
