"""Logs: what each rank and the driver of an attempt printed, while it runs and for as long as the run is kept."""

from typing import Annotated

from fastapi import Path, Query
from fastapi.responses import PlainTextResponse
from starlette.concurrency import run_in_threadpool

from service.api.dependencies import Controller, ControllerDependency, DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.errors import NotFound
from service.recordings import is_recording
from service.store.logs import DRIVER, LogRepository
from service.store.models import Attempt, Run
from service.store.runs import RunRepository
from service.store.session import Database

router = Router(tags=["runs"], responses=PROBLEMS)

RunId = Annotated[str, Path(max_length=64, description="The run's id.")]
AttemptNumber = Annotated[int | None, Query(ge=1, le=2**31, description="By default the newest.")]
Rank = Annotated[
    int | None,
    Query(ge=0, le=2**31, description="One rank's own; by default the driver's, which repeats all ranks' lines."),
]


@router.get("/runs/{run_id}/logs", response_class=PlainTextResponse)
async def read_logs(
    run_id: RunId,
    database: DatabaseDependency,
    controller: ControllerDependency,
    attempt: AttemptNumber = None,
    rank: Rank = None,
) -> PlainTextResponse:
    """Return what an attempt has printed so far: of a long log its beginning and its end."""
    found, submission_id = await run_in_threadpool(_stored, database, run_id, attempt, rank)
    if found is None and submission_id is not None and rank is None:
        # Nothing has arrived yet, or the driver never came so far as to send anything: Ray knows what it said.
        found = await _job_log(controller, submission_id)
    return PlainTextResponse((found or "").encode("utf-8", "replace").decode("utf-8"))


async def _job_log(controller: Controller, submission_id: str) -> str:
    text = await controller.job_logs(submission_id)
    if text is None:
        raise NotFound(
            f"Ray no longer has the log of {submission_id}", field="attempt", value=submission_id,
            remedy="the job ended before its driver sent anything, and the cluster that ran it is gone",
        )  # fmt: skip
    return text


def _stored(database: Database, uid: str, number: int | None, rank: int | None) -> tuple[str | None, str | None]:
    """Return what is kept of the log, None where nothing is, and the Ray job's name, None where there is no job."""
    with database.read() as session:
        run = RunRepository(session).get(uid)
        attempt = _attempt(run, number)
        if attempt is None:
            return None, None
        logs = LogRepository(session)
        known = logs.ranks(attempt)
        wanted = DRIVER if rank is None else rank
        if wanted >= run.world_size:
            raise NotFound(
                f"run {uid} has no rank {rank}", field="rank", value=rank,
                remedy=f"use 0 to {run.world_size - 1}",
            )  # fmt: skip
        # What a script of somebody's own has printed, no Ray has.
        job = None if is_recording(run) else attempt.submission_id
        return logs.read(attempt, wanted) if wanted in known else None, job


def _attempt(run: Run, number: int | None) -> Attempt | None:
    for attempt in reversed(run.attempts):
        if number is None or attempt.number == number:
            return attempt
    if number is None:
        return None
    raise NotFound(f"run {run.uid} has no attempt {number}", field="attempt", value=number)
