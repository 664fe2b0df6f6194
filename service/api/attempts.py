"""The workers' door: what a worker group says about its attempt (`muonscope/contract/attempts.py`).

Each request proves itself by the attempt's own bearer token, is fenced by epoch, and is one transaction.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

from fastapi import Depends, Path, Request, Response
from fastapi.concurrency import run_in_threadpool

from muonscope.contract.attempts import (
    AttemptFacts,
    AttemptOutcome,
    CheckpointFact,
    CheckpointReport,
    Enrolled,
    Enrolment,
    Heartbeat,
    HeartbeatReply,
    LoadReport,
    LogAccepted,
    LogPiece,
    StepsAccepted,
)
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, Phase, RunStatus
from muonscope.contract.telemetry import StepBatch, TelemetryError, decode_batch
from service.api.access import bearer
from service.api.dependencies import Controller, ControllerDependency, DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.conclusion import accept_outcome
from service.errors import Conflict, InvalidInput, MalformedRequest
from service.recordings import is_recording
from service.store.attempts import AttemptRepository
from service.store.audit import AuditAction, AuditRepository
from service.store.checkpoints import CheckpointRepository
from service.store.events import EventRepository
from service.store.load import LoadRepository
from service.store.logs import LogRepository
from service.store.models import Attempt
from service.store.runs import RunRepository
from service.store.session import Database, Session
from service.store.steps import StepRepository

router = Router(prefix="/attempts", tags=["attempts"], responses=PROBLEMS)

_WHO: Final = "workers"

AttemptId = Annotated[str, Path(alias="attempt_id", max_length=64, examples=["run-abcdefghijkl-a1"])]


async def bearer_token(request: Request) -> str | None:
    """Return the request's bearer token, None where it has none."""
    return bearer(request.headers)


BearerToken = Annotated[str | None, Depends(bearer_token)]


@router.post("/{attempt_id}/enrol", summary="Exchange the one-use enrolment token for the attempt's own")
def enrol(
    attempt_id: AttemptId, enrolment: Enrolment, database: DatabaseDependency, settings: SettingsDependency
) -> Enrolled:
    token = secrets.token_urlsafe(32)
    with _alarming(database, attempt_id), database.write() as session:
        attempt = AttemptRepository(session).enrol(
            attempt_id,
            enrolment_token=enrolment.token,
            token=token,
            lease_s=settings.lease_s,
            ray_job_id=enrolment.ray_job_id,
        )
        if attempt.heartbeat_at is not None:
            AttemptRepository(session).add_phase(attempt, Phase.ENROLLED, attempt.heartbeat_at.timestamp())
        return Enrolled(
            spec=RunSpec.model_validate(attempt.run.spec),
            run_id=attempt.run.uid,
            attempt=attempt.number,
            epoch=attempt.epoch,
            token=token,
            heartbeat_s=settings.heartbeat_s,
            stall_limit_s=settings.stall_limit_s,
            resume_step=attempt.first_step,
            checkpoints=tuple(
                CheckpointFact(step=row.step, total_bytes=row.total_bytes, manifest_sha256=row.manifest_sha256)
                for row in CheckpointRepository(session).list(attempt.run)
            ),
        )


@router.post("/{attempt_id}/facts", status_code=204, summary="Say what the attempt is made of, as it becomes known")
def add_facts(
    attempt_id: AttemptId,
    facts: AttemptFacts,
    token: BearerToken,
    database: DatabaseDependency,
    controller: ControllerDependency,
) -> Response:
    with database.write() as session:
        attempt = _admitted(session, attempt_id, token)
        AttemptRepository(session).add_facts(attempt, facts)
        if Phase.FIRST_STEP in facts.phases:
            _mark_running(session, attempt, controller)
    return Response(status_code=204)


@router.post("/{attempt_id}/heartbeat", summary="Give a sign of life and learn whether to stop")
def heartbeat(
    attempt_id: AttemptId,
    message: Heartbeat,
    token: BearerToken,
    database: DatabaseDependency,
    settings: SettingsDependency,
    controller: ControllerDependency,
) -> HeartbeatReply:
    with database.read() as session:
        was = AttemptRepository(session).authenticate(attempt_id, token).status
    starts = message.status is AttemptStatus.RUNNING and was is AttemptStatus.PENDING
    # A lost heartbeat costs nothing; a status must not be lost.
    with database.write(durable=starts) as session:
        attempt = _admitted(session, attempt_id, token)
        lease_s = settings.recording_lease_s if is_recording(attempt.run) else settings.lease_s
        AttemptRepository(session).heartbeat(attempt, message, lease_s=lease_s)
        if starts:
            _mark_running(session, attempt, controller)
        return HeartbeatReply(stop_requested=attempt.run.stop_requested)


@router.post(
    "/{attempt_id}/steps",
    summary="Store a telemetry batch, exactly once",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def add_steps(
    attempt_id: AttemptId,
    request: Request,
    token: BearerToken,
    database: DatabaseDependency,
) -> StepsAccepted:
    await run_in_threadpool(_authenticate, database, attempt_id, token)
    body = await request.body()
    return await run_in_threadpool(_store_steps, database, attempt_id, token, body)


@router.post("/{attempt_id}/checkpoints", status_code=204, summary="Say which complete checkpoints are there")
def report_checkpoints(
    attempt_id: AttemptId, report: CheckpointReport, token: BearerToken, database: DatabaseDependency
) -> Response:
    with database.write() as session:
        attempt = _admitted(session, attempt_id, token)
        CheckpointRepository(session).replace(attempt, report.checkpoints)
    return Response(status_code=204)


@router.post("/{attempt_id}/logs", summary="Keep what a rank or the driver printed")
def add_log(attempt_id: AttemptId, piece: LogPiece, token: BearerToken, database: DatabaseDependency) -> LogAccepted:
    with database.write(durable=False) as session:
        attempt = _admitted(session, attempt_id, token)
        return LogAccepted(stop=LogRepository(session).append(attempt, piece))


@router.post("/{attempt_id}/load", status_code=204, summary="Say how busy ranks, nodes and GPUs were")
def add_load(attempt_id: AttemptId, report: LoadReport, token: BearerToken, database: DatabaseDependency) -> Response:
    # Lost, it costs a point of a curve.
    with database.write(durable=False) as session:
        LoadRepository(session).add(_admitted(session, attempt_id, token), report.samples)
    return Response(status_code=204)


@router.post("/{attempt_id}/outcome", status_code=204, summary="Close the attempt and judge its run's record")
def add_outcome(
    attempt_id: AttemptId,
    outcome: AttemptOutcome,
    token: BearerToken,
    database: DatabaseDependency,
    controller: ControllerDependency,
) -> Response:
    if not outcome.status.is_terminal or outcome.status is AttemptStatus.LOST:
        raise InvalidInput(
            f"{outcome.status} is not an outcome", field="status", value=outcome.status,
            remedy="report succeeded, failed or stopped",
        )  # fmt: skip
    if outcome.status is AttemptStatus.FAILED and outcome.failure is None:
        raise InvalidInput("a failed attempt says why", field="failure", remedy="send failure.kind and failure.message")
    with database.write() as session:
        attempt = _admitted(session, attempt_id, token)
        accept_outcome(session, attempt, outcome, legal=controller.legal, retry_reason=controller.retry_reason)
    controller.wake()
    return Response(status_code=204)


def _authenticate(database: Database, attempt_id: str, token: str | None) -> None:
    with database.read() as session:
        AttemptRepository(session).authenticate(attempt_id, token)


def _store_steps(database: Database, attempt_id: str, token: str | None, body: bytes) -> StepsAccepted:
    batch = _decode(body)
    with _alarming(database, attempt_id), database.write(durable=False) as session:
        attempt = _admitted(session, attempt_id, token, epoch=batch.epoch)
        if len(batch) and batch.rank == 0 and min(batch.steps) < attempt.first_step:
            CheckpointRepository(session).note_earlier_start(attempt, min(batch.steps))
        stored = StepRepository(session).insert(attempt, batch)
        return StepsAccepted(stored=stored.stored, next_step=stored.next_step)


def _decode(body: bytes) -> StepBatch:
    try:
        return decode_batch(body)
    except TelemetryError as error:
        raise MalformedRequest(
            str(error), field="body", value=body[:16], remedy="send what muonscope.contract.telemetry encodes"
        ) from error


def _admitted(session: Session, attempt_id: str, token: str | None, *, epoch: int | None = None) -> Attempt:
    """Return the attempt that the token proves, if it may still write its run's record."""
    attempts = AttemptRepository(session)
    attempt = attempts.authenticate(attempt_id, token)
    attempts.fence(attempt, attempt.epoch if epoch is None else epoch)
    return attempt


def _mark_running(session: Session, attempt: Attempt, controller: Controller) -> None:
    if attempt.status is not AttemptStatus.PENDING:
        return
    why = "its workers train"
    AttemptRepository(session).set_status(attempt, AttemptStatus.RUNNING, who=_WHO, why=why)
    runs = RunRepository(session)
    run = runs.get(attempt.run.uid)
    if run.status is RunStatus.PENDING:
        runs.set_status(run, RunStatus.RUNNING, legal=controller.legal, who=_WHO, why=why)


@contextmanager
def _alarming(database: Database, attempt_id: str) -> Iterator[None]:
    """Leave an alarm where a request contradicts what is stored: someone may be speaking in the attempt's name."""
    try:
        yield
    except Conflict as conflict:
        with database.write() as session:
            attempt = AttemptRepository(session).find(attempt_id)
            if attempt is not None:
                EventRepository(session).append("alarm", attempt=attempt, who=_WHO, why=conflict.detail)
                AuditRepository(session).append(
                    AuditAction.ATTEMPT_ALARM, who=_WHO, subject=attempt_id, detail=conflict.detail
                )
                RunRepository(session).touch(attempt.run)
        raise
