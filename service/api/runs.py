"""Runs: submit, read, and the commands stop, retry and clone."""

from typing import Annotated, Any, Final

from fastapi import Body, Header, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from muonscope.contract.run_spec import BUILT_IN_TASKS, EXTERNAL_TASK, PlainTag, PlainText, RunSpec
from muonscope.contract.status import RunStatus
from service.api.dependencies import (
    CallerDependency,
    Controller,
    ControllerDependency,
    DatabaseDependency,
    SettingsDependency,
)
from service.api.responses import Router
from service.api.schemas import (
    PROBLEMS,
    REPEATED,
    RunCountsOut,
    RunOut,
    RunsOut,
    ValidRunOut,
    present_run,
    present_runs,
)
from service.conclusion import judge_run
from service.errors import IllegalTransition, InvalidInput
from service.recordings import is_recording
from service.settings import Settings
from service.store.audit import AuditAction, AuditRepository
from service.store.census import count_runs
from service.store.models import Run
from service.store.queue import QueueRepository
from service.store.runs import RunRepository, stated
from service.store.session import Session
from service.store.tags import MAX_TAGS, TagRepository

router = Router(tags=["runs"], responses=PROBLEMS)

RunId = Annotated[str, Path(max_length=64, description="The run's id.")]
IdempotencyKey = Annotated[
    str | None,
    Header(description="Makes a repeat of this request answer with the first one's run. 1 to 255 characters."),
]
_SPEC_EXAMPLE: Final[dict[str, Any]] = {
    "name": "thirty steps, ordered",
    "task": {"name": "simple_model"},
    "step_ordering": "ordered",
    "zero_stage": 1,
    "world_size": 2,
    "loss_scale": {"initial_power": 16},
    "optimizer": {"lr": 0.05},
    "steps": 30,
}


SearchText = Annotated[str, Query(description="Search: free text, or fields such as status:failed ordering:master")]


class RunChange(BaseModel):
    """What may change of a run that was accepted: how it is found again, never what it trains."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    add_tags: list[PlainTag] = Field(default_factory=list, max_length=MAX_TAGS)
    remove_tags: list[PlainText] = Field(default_factory=list, max_length=MAX_TAGS)
    """Tags that the run does not carry are passed over."""


@router.post("/runs", status_code=201, response_model=RunOut, responses=REPEATED)
def submit_run(
    spec: Annotated[RunSpec, Body(examples=[_SPEC_EXAMPLE])],
    response: Response,
    database: DatabaseDependency,
    settings: SettingsDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
    idempotency_key: IdempotencyKey = None,
) -> RunOut:
    """Queue a run, stored durably before this answers. A repeat with the same key answers 200 with the same run."""
    with database.write() as session:
        run, is_new = RunRepository(session).create(
            spec, idempotency_key=idempotency_key, who=caller, submitted_by=caller
        )
        if is_new:
            _accept(session, spec, settings, controller)
        shown = _present(session, run)
    controller.wake()
    response.headers["Location"] = f"/runs/{shown.id}"
    if not is_new:
        response.status_code = 200
    return shown


@router.post("/runs/validate", summary="Say whether a spec would be accepted, and queue nothing")
def validate_run(
    spec: Annotated[RunSpec, Body(examples=[_SPEC_EXAMPLE])],
    settings: SettingsDependency,
    controller: ControllerDependency,
) -> ValidRunOut:
    """Refuses what POST /runs refuses of a spec, with the same answer; a drained queue is no matter of the spec."""
    check_runnable(spec, settings, controller)
    stored = stated(spec)
    return ValidRunOut(spec=stored.model_dump(mode="json"), fingerprint=stored.fingerprint())


@router.get("/runs", response_model=RunsOut)
def list_runs(
    database: DatabaseDependency,
    q: SearchText = "",
    sort: Annotated[str, Query(max_length=64, description="A field, with - before it for descending.")] = "-created_at",
    cursor: Annotated[str | None, Query(max_length=2048)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> RunsOut:
    """List runs, newest first unless sorted otherwise."""
    with database.read() as session:
        runs = RunRepository(session)
        page = runs.list(q=q, sort=sort, cursor=cursor, limit=limit)
        shown = present_runs(page.runs, runs.queue_positions(page.runs))
    return RunsOut(runs=shown, next_cursor=page.next_cursor)


# Before /runs/{run_id}, which would take it for a run's id; ids are longer.
@router.get("/runs/counts", summary="Count the runs that a search finds, by status and by verdict")
def read_counts(database: DatabaseDependency, q: SearchText = "") -> RunCountsOut:
    with database.read() as session:
        counts = count_runs(session, q)
    return RunCountsOut(total=counts.total, statuses=counts.statuses, verdicts=counts.verdicts)


@router.get("/runs/{run_id}", response_model=RunOut)
def read_run(run_id: RunId, database: DatabaseDependency) -> RunOut:
    with database.read() as session:
        return _present(session, RunRepository(session).get(run_id))


@router.patch("/runs/{run_id}", summary="Put tags on a run, or take tags off it, whatever its status")
def change_run(
    run_id: RunId,
    change: Annotated[RunChange, Body(examples=[{"add_tags": ["night"], "remove_tags": ["draft"]}])],
    database: DatabaseDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
) -> RunOut:
    """Sent twice it has the effect of sending it once. The spec keeps the tags it was submitted with."""
    with database.write() as session:
        run = RunRepository(session).get(run_id)
        is_changed = TagRepository(session).change(run, add=change.add_tags, remove=change.remove_tags, who=caller)
        shown = _present(session, run)
    if is_changed:
        controller.wake()  # limits count GPUs by tag
    return shown


@router.post("/runs/{run_id}/stop", status_code=202, response_model=RunOut)
def stop_run(
    run_id: RunId, database: DatabaseDependency, controller: ControllerDependency, caller: CallerDependency
) -> RunOut:
    """Stop a run. A queued one is stopped when this answers; a live one's job is told at once and killed in seconds."""
    with database.write() as session:
        runs = RunRepository(session)
        run = runs.get(run_id)
        if is_recording(run) and not run.status.is_terminal:
            raise IllegalTransition(
                f"run {run.uid} is recorded from a script of somebody's own", field="status", value=run.status,
                remedy="end the script where it runs; its record is closed with it",
            )  # fmt: skip
        if run.status is RunStatus.QUEUED:
            runs.set_status(run, RunStatus.STOPPED, legal=controller.legal, who=caller, why="stop requested")
            # It may wait for its next attempt: what the ones before have recorded proves what it proves.
            judge_run(session, runs.get(run_id))
        elif run.status.is_terminal and run.status is not RunStatus.STOPPED:
            raise IllegalTransition(
                f"run {run.uid} has {run.status} already", field="status", value=run.status,
                remedy="there is nothing to stop",
            )  # fmt: skip
        elif not run.status.is_terminal:
            runs.request_stop(run, who=caller)
        AuditRepository(session).append(AuditAction.RUN_STOPPED, who=caller, subject=run.uid)
        shown = _present(session, run)
    controller.wake()
    return shown


@router.post("/runs/{run_id}/retry", status_code=202, response_model=RunOut)
def retry_run(
    run_id: RunId,
    database: DatabaseDependency,
    settings: SettingsDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
) -> RunOut:
    """Queue a failed or stopped run again, for another attempt under the same id."""
    with database.write() as session:
        runs = RunRepository(session)
        run = runs.get(run_id)
        if is_recording(run):
            raise IllegalTransition(
                f"run {run.uid} was recorded from a script of somebody's own", field="status", value=run.status,
                remedy="start the script again: it becomes a run of its own",
            )  # fmt: skip
        if run.status not in (RunStatus.FAILED, RunStatus.STOPPED):
            raise IllegalTransition(
                f"run {run.uid} is {run.status}; only failed and stopped runs are retried", field="status",
                value=run.status, remedy=f"POST /runs/{run.uid}/clone runs its spec again as a new run",
            )  # fmt: skip
        # A record that was imported was never held against what may run here.
        check_runnable(RunSpec.model_validate(run.spec), settings, controller)
        runs.set_status(run, RunStatus.QUEUED, legal=controller.legal, who=caller, why="retry requested")
        shown = _present(session, run)
    controller.wake()
    return shown


@router.post("/runs/{run_id}/clone", status_code=201, response_model=RunOut, responses=REPEATED)
def clone_run(
    run_id: RunId,
    response: Response,
    database: DatabaseDependency,
    settings: SettingsDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
    idempotency_key: IdempotencyKey = None,
) -> RunOut:
    """Queue a new run with the same spec."""
    with database.write() as session:
        runs = RunRepository(session)
        spec = RunSpec.model_validate(runs.get(run_id).spec)
        run, is_new = runs.create(
            spec, idempotency_key=idempotency_key, who=caller, why=f"cloned from {run_id}", submitted_by=caller
        )
        if is_new:
            _accept(session, spec, settings, controller)
        shown = _present(session, run)
    controller.wake()
    response.headers["Location"] = f"/runs/{shown.id}"
    if not is_new:
        response.status_code = 200
    return shown


def _accept(session: Session, spec: RunSpec, settings: Settings, controller: Controller) -> None:
    """Refuse a new run, and with it its transaction. A repeat is answered as it was the first time, come what may."""
    check_runnable(spec, settings, controller)
    QueueRepository(session).refuse_while_draining()


def check_runnable(spec: RunSpec, settings: Settings, controller: Controller) -> None:
    """Refuse what could never start here, so that it does not wait for ever.

    Raises:
        InvalidInput: an unlisted task, or more GPUs than the cluster has in all, and is not said to come to have.
    """
    name = spec.task.name
    if name == EXTERNAL_TASK:
        raise InvalidInput(
            "the task external is a script of somebody's own, which the service does not start",
            field="task.name", value=name, remedy="start the script; `muonscope.record` in it records it",
        )  # fmt: skip
    if name not in BUILT_IN_TASKS and name not in settings.allow_tasks:
        raise InvalidInput(
            f"the task {name} is not allowed here", field="task.name", value=name,
            remedy=f"use one of {', '.join((*BUILT_IN_TASKS, *settings.allow_tasks))}, "
            "or name it in MUONSCOPE_ALLOW_TASKS where the service starts, and start that anew",
        )  # fmt: skip
    _check_size(spec, settings, controller)


def _check_size(spec: RunSpec, settings: Settings, controller: Controller) -> None:
    total = controller.most_gpus()
    wanted = spec.world_size * spec.resources.gpus_per_rank
    if total is not None and wanted > total + 1e-6:
        most = int((total + 1e-6) // spec.resources.gpus_per_rank)
        is_promise = settings.cluster_max_gpus == total and controller.total_gpus() != total
        raise InvalidInput(
            f"world_size={spec.world_size} at {spec.resources.gpus_per_rank:g} GPUs per rank needs {wanted:g} GPUs; "
            f"the cluster {'may come to have' if is_promise else 'has'} {total:g}",
            field="world_size",
            value=spec.world_size,
            remedy=f"use at most {most}" if most else "lower resources.gpus_per_rank, or add GPUs to the cluster",
        )


def _present(session: Session, run: Run) -> RunOut:
    return present_run(run, RunRepository(session).queue_positions([run]))
