"""Experiments: a matrix of runs queued together, and the table that answers their question."""

import base64
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import numpy as np
from fastapi import Body, Path, Query, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muonscope.contract.attempts import FinalState
from muonscope.contract.published import BYTE_GPT, THIRTY_STEP
from muonscope.contract.run_spec import MAX_NAME_LENGTH, RunSpec
from service.analysis import builtin_experiments, experiment_table
from service.analysis.figures import READ_STEPS, Readings, RunResult
from service.analysis.matrix import Cell, expand
from service.api.dependencies import (
    CallerDependency,
    ControllerDependency,
    DatabaseDependency,
    SettingsDependency,
)
from service.api.problems import validation_problem
from service.api.responses import Router
from service.api.runs import check_runnable
from service.api.schemas import PROBLEMS, Out, RunOut, present_runs
from service.errors import InvalidInput
from service.store.experiments import ExperimentRepository, experiment_status
from service.store.models import Experiment, Run
from service.store.queue import QueueRepository
from service.store.runs import RunRepository
from service.store.session import Session
from service.store.steps import StepRepository
from service.store.summary import get_scalar

router = Router(prefix="/experiments", tags=["experiments"], responses=PROBLEMS)


class ExperimentIn(BaseModel):
    """A matrix of one's own (`name`, `base`, `matrix`), or a built-in experiment by its name and options."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    builtin: str | None = Field(None, max_length=100)
    """thirty-step, byte-gpt, calm-boom, mixed-overflow, gradient-accumulation, scale-change, dtype-assertion, or
    published-tables for all with published figures. All take `gpus_per_rank` and `deepspeed`, the version of a release
    to run under, unmodified; byte-gpt also `text`, a file or folder.
    """
    name: str | None = Field(None, min_length=1, max_length=MAX_NAME_LENGTH)
    base: dict[str, Any] = Field(default_factory=dict)
    """What all runs share: a run spec, defaults left out."""
    matrix: dict[str, list[Any]] = Field(default_factory=dict)
    """Values by dotted field of the run spec; every combination is a run."""


class CheckOut(Out):
    matches: bool
    differences: list[str]


class TableOut(Out):
    columns: list[str]
    rows: list[list[Any]]
    """One a run, cells in the order of the columns."""
    run_ids: list[str]
    check_label: str
    """What the checks hold the runs against: figures that are `published`, or what is `expected`."""
    checked: str
    """What of a run they hold against them, in words; empty where that is each row's own."""
    published: list[CheckOut | None]
    """By row, whether the run shows what is published of it; null where nothing is, or it has not ended."""


class ExperimentOut(Out):
    id: str
    name: str
    builtin: str | None
    status: str
    """queued, running, succeeded (every run has ended) or stopped (every run has ended, some were stopped)."""
    created_at: datetime
    matrix: dict[str, list[Any]]
    runs: list[RunOut]
    table: TableOut


class ExperimentsOut(Out):
    experiments: list[ExperimentOut]
    next_cursor: int | None


ExperimentId = Annotated[str, Path(alias="experiment_id", max_length=64, examples=["abcdefghijkl"])]


@router.post("", status_code=201, summary="Queue every run of a matrix, or of a built-in experiment")
def create_experiment(
    asked: Annotated[ExperimentIn, Body(examples=[{"builtin": "thirty-step"}])],
    response: Response,
    database: DatabaseDependency,
    settings: SettingsDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
) -> ExperimentOut:
    name, base, matrix, cells = _plan(asked)
    specs = [_validated(cell) for cell in cells]
    for spec in specs:
        check_runnable(spec, settings, controller)
    with database.write() as session:
        QueueRepository(session).refuse_while_draining()
        experiment = ExperimentRepository(session).create(
            name, specs, base=base, matrix=matrix, builtin=asked.builtin, who=caller
        )
        shown = _present(session, experiment)
    controller.wake()
    response.headers["Location"] = f"/experiments/{shown.id}"
    return shown


@router.get("", summary="List experiments, newest first")
def list_experiments(
    database: DatabaseDependency,
    cursor: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ExperimentsOut:
    with database.read() as session:
        found = ExperimentRepository(session).list(before=cursor, limit=limit + 1)
        page = found[:limit]
        shown = [_present(session, experiment) for experiment in page]
    return ExperimentsOut(experiments=shown, next_cursor=page[-1].id if len(found) > limit else None)


class Markdown(PlainTextResponse):
    media_type = "text/markdown"


class Csv(PlainTextResponse):
    media_type = "text/csv"


# The suffixed paths come first: an id would match them too.
@router.get("/{experiment_id}.md", summary="Read an experiment's table as Markdown", response_class=Markdown)
def read_markdown(experiment_id: ExperimentId, database: DatabaseDependency) -> Response:
    with database.read() as session:
        table = _table_of(session, ExperimentRepository(session).get(experiment_id))
    return Markdown(table.as_markdown())


@router.get("/{experiment_id}.csv", summary="Read an experiment's table as CSV", response_class=Csv)
def read_csv(experiment_id: ExperimentId, database: DatabaseDependency) -> Response:
    with database.read() as session:
        table = _table_of(session, ExperimentRepository(session).get(experiment_id))
    headers = {"Content-Disposition": f'attachment; filename="{experiment_id}.csv"'}
    return Csv(table.as_csv(), headers=headers)


@router.get("/{experiment_id}", summary="Read an experiment, its runs and its table")
def read_experiment(experiment_id: ExperimentId, database: DatabaseDependency) -> ExperimentOut:
    with database.read() as session:
        return _present(session, ExperimentRepository(session).get(experiment_id))


def _plan(asked: ExperimentIn) -> tuple[str, dict[str, Any], dict[str, Any], list[Cell]]:
    options = dict(asked.model_extra or {})
    if asked.name is not None and not asked.name.strip():
        raise InvalidInput(
            "name must not be blank", field="name", value=asked.name, remedy="give it a word, or leave it out"
        )
    if asked.builtin is not None:
        if asked.base or asked.matrix:
            raise InvalidInput(
                "a built-in experiment brings its own base and matrix", field="builtin", value=asked.builtin,
                remedy="leave base and matrix out, or builtin",
            )  # fmt: skip
        builtin = builtin_experiments.build(asked.builtin, options)
        return asked.name or builtin.name, builtin.base, builtin.matrix, builtin.cells
    if options:
        unknown = next(iter(options))
        raise InvalidInput(
            f"{unknown} is not a field of an experiment", field=unknown, value=options[unknown], remedy="remove it"
        )
    if asked.name is None:
        raise InvalidInput("an experiment has a name", field="name", remedy="give name, or builtin")
    return asked.name, asked.base, asked.matrix, expand(asked.base, asked.matrix, name=asked.name)


def _validated(cell: Cell) -> RunSpec:
    try:
        return RunSpec.model_validate(cell.spec)
    except ValidationError as error:
        raise validation_problem(error.errors(), cell.spec) from error


def _present(session: Session, experiment: Experiment) -> ExperimentOut:
    runs = ExperimentRepository(session).runs(experiment)
    statuses = [run.status for run in runs]
    return ExperimentOut(
        id=experiment.uid,
        name=experiment.name,
        builtin=experiment.builtin,
        status=experiment_status({status: statuses.count(status) for status in statuses}),
        created_at=experiment.created_at,
        matrix=experiment.matrix,
        runs=present_runs(runs, RunRepository(session).queue_positions(runs)),
        table=TableOut.model_validate(_table(session, experiment, runs).as_json()),
    )


def _table_of(session: Session, experiment: Experiment) -> experiment_table.Table:
    return _table(session, experiment, ExperimentRepository(session).runs(experiment))


def _table(session: Session, experiment: Experiment, runs: Sequence[Run]) -> experiment_table.Table:
    builtin = experiment.builtin
    reads = builtin not in (None, THIRTY_STEP, BYTE_GPT)
    results = [_result(run, _readings(session, run) if reads else Readings()) for run in runs]
    fields = tuple(experiment.matrix) or builtin_experiments.FIELDS.get(builtin or "", experiment_table.STANDARD_FIELDS)
    return experiment_table.build_table(results, fields, builtin=builtin, extra=_losses(session, runs, builtin))


def _readings(session: Session, run: Run) -> Readings:
    """Read what the figures of a built-in experiment's run are made of."""
    steps = StepRepository(session).page(run, limit=READ_STEPS).steps
    attempt = run.attempts[-1] if run.attempts else None
    final = FinalState() if attempt is None or attempt.final is None else FinalState.model_validate(attempt.final)
    motions = final.parameter_motions
    return Readings(
        norms=tuple(tuple(np.frombuffer(step.record.parameter_norms, "<f4").tolist()) for step in steps),
        ns_calls=tuple(step.record.ns_calls for step in steps),
        weights=None
        if final.weights is None
        else np.frombuffer(base64.b64decode(final.weights), "<f4").astype(np.float64),
        parameters_hash=final.final_parameters_hash,
        motion=None if motions is None else math.sqrt(math.fsum(motion * motion for motion in motions)),
        changed_before_cast=final.parameters_changed_before_cast,
    )


def _losses(session: Session, runs: Sequence[Run], builtin: str | None) -> dict[str, list[experiment_table.Cell]]:
    """Return what shows that a model learns: each run's last loss, and byte-gpt's first ones.

    Of other built-in experiments, whose models learn one batch by heart or nothing, the losses say nothing.
    """
    if builtin not in (None, BYTE_GPT):
        return {}
    last: dict[str, list[experiment_table.Cell]] = {"last loss": [get_scalar(run.summary, "last_loss") for run in runs]}
    if builtin is None:
        return last
    first: list[experiment_table.Cell] = []
    for run in runs:
        steps = StepRepository(session).page(run, limit=1).steps
        first.append(steps[0].record.loss if steps else None)
    return {"first loss": first, **last}


def _result(run: Run, readings: Readings) -> RunResult:
    summary = run.summary
    return RunResult(
        run_id=run.uid,
        spec=run.spec,
        status=run.status,
        verdict=run.verdict,
        verdict_step=run.verdict_step,
        steps=summary.steps,
        overflows=summary.overflows,
        final_loss_scale=get_scalar(summary, "final_loss_scale"),
        parameters_moved=summary.parameters_moved,
        parameters_total=summary.parameters_total,
        momentum_finite=summary.momentum_finite,
        max_weight_motion=get_scalar(summary, "max_weight_motion"),
        failure=run.failure_kind,
        readings=readings,
    )
