"""A run's record, as pages of rows, as columns for a chart, as files; its parameters and their momentum norms."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import Path, Query, Response
from pydantic_core import to_json

from service.analysis.downsampling import EXACT_UP_TO
from service.api.dependencies import DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.api.step_exports import MEDIA_TYPES, export_steps
from service.api.step_schemas import (
    ParameterSeriesOut,
    ParametersOut,
    ParameterStepsOut,
    SeriesOut,
    StepsOut,
    parameter_json,
    parameter_series_json,
    parameter_step_json,
    series_json,
    step_json,
    thinned_json,
)
from service.errors import InvalidInput
from service.store.models import Run
from service.store.outlines import OutlineRepository
from service.store.parameters import ParameterRepository
from service.store.runs import RunRepository
from service.store.session import Session
from service.store.steps import MAX_PAGE, StepRepository

router = Router(prefix="/runs", tags=["steps"], responses=PROBLEMS)

DEFAULT_FIELDS: Final = ("loss", "loss_scale_before", "grad_norm", "update_norm", "momentum_norm")
MAX_POINTS: Final = 200_000
_LARGEST_STEP: Final = 2**63 - 1

RunId = Annotated[str, Path(alias="run_id", max_length=64, examples=["abcdefghijkl"])]
Start = Annotated[int, Query(ge=0, le=_LARGEST_STEP, description="The first step wanted.")]
Stop = Annotated[int | None, Query(ge=0, le=_LARGEST_STEP, description="The step to end before; absent: no end.")]


MaxPoints = Annotated[
    int | None,
    Query(
        ge=2,
        le=MAX_POINTS,
        description="Answer with columns for a chart: exact up to 20,000 steps, beyond them at most this many "
        "points, the extremes of each bucket of 24 steps or more.",
    ),
]


@router.get(
    "/{run_id}/steps",
    summary="Read a run's steps, every one of them exact",
    responses={
        200: {
            "model": StepsOut | SeriesOut,
            "content": {kind: {"schema": {"type": "string"}} for kind in MEDIA_TYPES.values()},
        }
    },
    response_class=Response,
)
def get_steps(
    run_id: RunId,
    database: DatabaseDependency,
    start: Start = 0,
    stop: Stop = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Rows a page.")] = 1000,
    max_points: MaxPoints = None,
    fields: Annotated[str | None, Query(max_length=1000, description="Columns wanted, with commas between.")] = None,
    format: Annotated[
        Literal["json", "csv", "parquet", "arrow"],
        Query(
            description="`csv`, `parquet` and `arrow` (an IPC stream) give every step from start to stop; the last two "
            "hold the momentum norms too and need pyarrow.",
        ),
    ] = "json",
) -> Response:  # fmt: skip
    if format != "json":
        return export_steps(database, run_id, format, start, stop)
    with database.read() as session:
        run = RunRepository(session).get(run_id)
        steps = StepRepository(session)
        if max_points is not None or fields is not None:
            return _json(_chart(session, run, _names(fields), start, stop, max_points or MAX_POINTS))
        page = steps.page(run, start=start, stop=stop, limit=limit)
    return _json({"steps": [step_json(current) for current in page.steps], "next_start": page.next_start})


@router.get("/{run_id}/parameters", summary="List a run's parameters and which optimizer takes each, and why")
def get_parameters(run_id: RunId, database: DatabaseDependency) -> ParametersOut:
    with database.read() as session:
        parameters = ParameterRepository(session).list(RunRepository(session).get(run_id))
    return ParametersOut.model_validate({"parameters": [parameter_json(parameter) for parameter in parameters]})


@router.get(
    "/{run_id}/parameters/{index}/steps",
    summary="Read one parameter's momentum norm after each step",
    responses={200: {"model": ParameterStepsOut | ParameterSeriesOut}},
    response_class=Response,
)
def get_parameter_steps(
    run_id: RunId,
    index: int,
    database: DatabaseDependency,
    start: Start = 0,
    stop: Stop = None,
    limit: Annotated[int, Query(ge=1, le=MAX_POINTS, description="Rows a page.")] = 20_000,
    max_points: MaxPoints = None,
) -> Response:
    with database.read() as session:
        run = RunRepository(session).get(run_id)
        parameter = ParameterRepository(session).get(run, index)
        if max_points is not None:
            return _json(_parameter_chart(session, run, parameter.index, start, stop, max_points))
        rows = StepRepository(session).parameter_norms(run, parameter.index, start=start, stop=stop, limit=limit + 1)
    found = [parameter_step_json(step, norm) for step, norm in rows[:limit]]
    return _json({"steps": found, "next_start": rows[limit][0] if len(rows) > limit else None})


def _chart(
    session: Session, run: Run, names: Sequence[str], start: int, stop: int | None, max_points: int
) -> dict[str, Any]:
    """Return every step where there are few, else extremes: read from blocks, from rows where blocks cannot say it."""
    few = max(EXACT_UP_TO, max_points)
    outline = OutlineRepository(session).read(run, names, start=start, stop=stop, longer_than=few)
    if outline is not None:
        return thinned_json(outline, max_points)
    columns = StepRepository(session).columns(run, names, start=start, stop=stop)
    return series_json(columns) if len(columns) <= few else thinned_json(columns, max_points)


def _parameter_chart(
    session: Session, run: Run, index: int, start: int, stop: int | None, max_points: int
) -> dict[str, Any]:
    """Do the same with one parameter's momentum norms."""
    few = max(EXACT_UP_TO, max_points)
    outline = OutlineRepository(session).read_parameter(run, index, start=start, stop=stop, longer_than=few)
    if outline is not None:
        return parameter_series_json(thinned_json(outline, max_points))
    columns = StepRepository(session).parameter_columns(run, index, start=start, stop=stop)
    return parameter_series_json(series_json(columns) if len(columns) <= few else thinned_json(columns, max_points))


def _names(fields: str | None) -> tuple[str, ...]:
    if fields is None:
        return DEFAULT_FIELDS
    names = tuple(dict.fromkeys(name.strip() for name in fields.split(",") if name.strip()))
    if not names:
        raise InvalidInput("no field is named", field="fields", value=fields, remedy="write fields=loss,grad_norm")
    return tuple(name for name in names if name != "step") or DEFAULT_FIELDS


def _json(document: dict[str, Any]) -> Response:
    # Already plain: validating a million numbers again would cost more than reading them. Pydantic's own writer puts
    # floats down several times faster than the standard library's, and what is not finite as our strings.
    return Response(to_json(document, inf_nan_mode="strings"), media_type="application/json")
