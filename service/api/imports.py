"""Records that were made elsewhere become runs that have ended, with all their steps and the verdicts they prove."""

import secrets
from itertools import pairwise
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, RunStatus
from muonscope.contract.telemetry import StepBatch, TelemetryError, decode_batch
from service.api.dependencies import CallerDependency, Controller, ControllerDependency, DatabaseDependency
from service.api.schemas import PROBLEMS, RunOut, present_run
from service.conclusion import close_attempt
from service.errors import InvalidInput, MalformedRequest
from service.store.attempts import AttemptRepository
from service.store.runs import RunRepository
from service.store.session import Database
from service.store.steps import StepRepository

router = APIRouter(prefix="/imports", tags=["runs"], responses=PROBLEMS)

TAG: Final = "imported"


@router.post(
    "/steps",
    status_code=201,
    response_model=RunOut,
    summary="Keep a record that was made elsewhere as a run that has ended",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def import_steps(
    request: Request,
    database: DatabaseDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
    name: Annotated[str, Query(min_length=1, max_length=200)],
    source: Annotated[
        str, Query(max_length=500, description="Where the record is from; kept in the run's notes.")
    ] = "",
) -> RunOut:
    """The body is a telemetry batch; epoch and rank say nothing here. The spec is known by its name and steps alone."""
    body = await request.body()
    return await run_in_threadpool(_import, database, controller, body, name, source, caller)


def _import(database: Database, controller: Controller, body: bytes, name: str, source: str, who: str) -> RunOut:
    batch = _decode(body)
    try:
        spec = RunSpec(name=name, steps=batch.steps[-1] + 1, world_size=1, tags=(TAG,), notes=source)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise InvalidInput(
            str(wrong["msg"]), field=str(wrong["loc"][0]), value=wrong["input"], remedy="import another record"
        ) from error
    with database.write() as session:
        # One transaction: nobody ever sees it queued.
        runs, attempts = RunRepository(session), AttemptRepository(session)
        run, _ = runs.create(spec, who=who, why="imported")
        runs.set_status(run, RunStatus.PENDING, legal=controller.legal, who=who, why="imported")
        attempt = attempts.create(
            run, enrolment_token=secrets.token_urlsafe(32), lease_s=60.0, first_step=batch.steps[0], who=who,
            why="imported",
        )  # fmt: skip
        runs.set_status(run, RunStatus.RUNNING, legal=controller.legal, who=who, why="imported")
        session.flush()
        attempt = attempts.get(attempt.submission_id)
        StepRepository(session).insert(attempt, batch)
        run = close_attempt(
            session, attempt, AttemptStatus.SUCCEEDED, legal=controller.legal, retry_reason=controller.retry_reason,
            who=who, why="imported",
        )  # fmt: skip
        return present_run(runs.get(run.uid))


def _decode(body: bytes) -> StepBatch:
    try:
        batch = decode_batch(body)
    except TelemetryError as error:
        raise MalformedRequest(
            str(error), field="body", value=body[:16], remedy="send what muonscope.contract.telemetry encodes"
        ) from error
    if not len(batch):
        raise InvalidInput("the record holds no step", field="body", remedy="import a record with steps")
    if any(after <= before for before, after in pairwise(batch.steps)):
        raise InvalidInput("the record's steps are not in order", field="body", remedy="send each step once, in order")
    return batch
