"""Records that were made elsewhere become runs that have ended, with all their steps and the verdicts they prove."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Final

from fastapi import Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError

from muonscope.contract.recordings import RunRecord
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus
from muonscope.contract.telemetry import StepBatch, TelemetryError, decode_batch
from service.api.dependencies import CallerDependency, Controller, ControllerDependency, DatabaseDependency
from service.api.problems import validation_problem
from service.api.responses import Router
from service.api.schemas import PROBLEMS, REPEATED, RunOut, present_run
from service.conclusion import accept_outcome, close_attempt
from service.errors import InvalidInput, MalformedRequest
from service.recordings import begin_recording
from service.store.attempts import AttemptRepository
from service.store.runs import RunRepository, imported_key
from service.store.session import Database
from service.store.steps import StepRepository

router = Router(prefix="/imports", tags=["runs"], responses=PROBLEMS)

TAG: Final = "imported"
# Of an attempt that ends in the transaction that makes it.
_LEASE_S: Final = 60.0


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


@router.post(
    "/runs",
    status_code=201,
    response_model=RunOut,
    responses=REPEATED,
    summary="Keep a whole run that ended elsewhere",
)
def import_run(
    record: RunRecord,
    response: Response,
    database: DatabaseDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
) -> RunOut:
    """One transaction: the run is here with all its steps and its verdict, or not at all. Again, 200: the same run."""
    batches = [_decode(_bytes_of(batch)) for batch in record.batches]
    steps = [step for batch in batches for step in batch.steps]
    _refuse_disorder(steps)
    if record.outcome.declared_steps != len(steps):
        raise InvalidInput(
            f"the record declares {record.outcome.declared_steps} steps and holds {len(steps)}",
            field="outcome.declared_steps", value=record.outcome.declared_steps, remedy="send the record whole",
        )  # fmt: skip
    key = imported_key(record.id)
    with database.write() as session:
        earlier = RunRepository(session).find_by_key(key)
        if earlier is not None:
            response.status_code = 200
            return present_run(earlier)
        first_step = steps[0] if steps else 0
        attempt, _ = begin_recording(
            session, record.spec, lease_s=_LEASE_S, legal=controller.legal, who=caller, why="imported",
            first_step=first_step, idempotency_key=key,
        )  # fmt: skip
        AttemptRepository(session).add_facts(attempt, record.facts)
        for batch in batches:
            StepRepository(session).insert(attempt, batch)
        outcome = record.outcome.model_copy(update={"first_step": first_step})
        run = accept_outcome(
            session, attempt, outcome, legal=controller.legal, retry_reason=lambda failure, attempts: None
        )
        return present_run(RunRepository(session).get(run.uid))


def _import(database: Database, controller: Controller, body: bytes, name: str, source: str, who: str) -> RunOut:
    batch = _decode(body)
    try:
        spec = RunSpec(name=name, steps=batch.steps[-1] + 1, world_size=1, tags=(TAG,), notes=source)
    except ValidationError as error:
        raise validation_problem(error.errors(), None) from error
    with database.write() as session:
        # One transaction: nobody ever sees it running.
        attempt, _ = begin_recording(
            session, spec, lease_s=_LEASE_S, legal=controller.legal, who=who, why="imported",
            first_step=batch.steps[0],
        )  # fmt: skip
        StepRepository(session).insert(attempt, batch)
        run = close_attempt(
            session, attempt, AttemptStatus.SUCCEEDED, legal=controller.legal, retry_reason=controller.retry_reason,
            who=who, why="imported",
        )  # fmt: skip
        return present_run(RunRepository(session).get(run.uid))


def _decode(body: bytes) -> StepBatch:
    try:
        batch = decode_batch(body)
    except TelemetryError as error:
        raise MalformedRequest(
            str(error), field="body", value=body[:16], remedy="send what muonscope.contract.telemetry encodes"
        ) from error
    if not len(batch):
        raise InvalidInput("the record holds no step", field="body", remedy="import a record with steps")
    _refuse_disorder(batch.steps)
    # What ends here is rank 0's record, whoever sent it.
    return replace(batch, rank=0)


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidInput(
            "a batch is not base64", field="batches", value=text[:16], remedy="send what `muonscope import` sends"
        ) from error


def _refuse_disorder(steps: Sequence[int]) -> None:
    if any(after <= before for before, after in pairwise(steps)):
        raise InvalidInput("the record's steps are not in order", field="body", remedy="send each step once, in order")
