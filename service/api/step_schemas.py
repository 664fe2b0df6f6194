"""How steps, series and parameters look as JSON; numbers that are not finite are strings, null is not measured."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, WithJsonSchema

from muonscope.contract.status import ParameterRoute
from muonscope.contract.telemetry import COUNTS, STEP_FIELDS, StepRecord, encode_number
from service.analysis.downsampling import thin, thin_outline
from service.api.schemas import Out
from service.columns import (
    KIND_NAMES,
    Flags,
    Floats,
    Integers,
    Marks,
    Outline,
    StepColumns,
    kind_lengths,
    run_lengths,
)
from service.store.models import Parameter
from service.store.steps import CurrentStep

# A finite number, one of the strings "NaN", "Infinity" and "-Infinity", or null where it was not measured.
Measurement = Annotated[
    float | str | None,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}, {"type": "null"}]}),
]


class StepOut(Out):
    """One attempted optimizer step; null means not measured."""

    step: int
    attempt: int
    overflow: bool
    discarded: bool
    loss_scale_before: Measurement
    loss_scale_after: Measurement
    loss: Measurement
    lr: Measurement
    grad_norm: Measurement
    update_norm: Measurement
    momentum_norm: Measurement
    step_time_s: Measurement
    largest_parameter: int | None
    """Index of the parameter with the largest momentum norm."""
    nonfinite_parameters: int | None
    ns_calls: int | None
    tokens: int | None


class StepsOut(Out):
    steps: list[StepOut]
    next_start: int | None
    """Where the next page starts; null on the last."""


class NonfiniteRunOut(Out):
    first: int
    last: int
    value: Annotated[str, Field(pattern="^(NaN|Infinity|-Infinity)$")]


class SeriesOut(Out):
    """Columns for a chart."""

    series: dict[str, list[Measurement]]
    """`step` and the fields asked for, all equally long."""
    overflow_runs: list[tuple[int, int]]
    discarded_runs: list[tuple[int, int]]
    nonfinite_runs: dict[str, list[NonfiniteRunOut]]
    """By field, exact: where the values are not finite."""
    exact: bool
    """Whether every step is a point; else each field keeps the extremes of each bucket."""


class ParameterOut(Out):
    index: int
    name: str
    shape: list[int]
    route: ParameterRoute
    reason: str


class ParametersOut(Out):
    parameters: list[ParameterOut]


class ParameterStepOut(Out):
    step: int
    momentum_norm: Measurement


class ParameterStepsOut(Out):
    steps: list[ParameterStepOut]
    next_start: int | None


class ParameterSeriesOut(Out):
    """One parameter's columns for a chart."""

    series: dict[str, list[Measurement]]
    """`step` and `momentum_norm`, equally long."""
    nonfinite_runs: dict[str, list[NonfiniteRunOut]]
    """Of `momentum_norm`, exact."""
    exact: bool


STEP_KEYS = ("step", "attempt", *STEP_FIELDS[1:])


def step_json(current: CurrentStep) -> dict[str, Any]:
    """Return a step's JSON, keys in the order of STEP_KEYS."""
    document: dict[str, Any] = {"step": current.record.step, "attempt": current.attempt}
    for name in STEP_FIELDS[1:]:
        document[name] = encode_number(getattr(current.record, name))
    return document


def csv_cells(current: CurrentStep) -> list[str]:
    """Return a step's cells: nan, inf and -inf as such, empty where not measured."""
    record = current.record
    return [str(record.step), str(current.attempt), *(_cell(record, name) for name in STEP_FIELDS[1:])]


def _cell(record: StepRecord, name: str) -> str:
    value = getattr(record, name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def parameter_json(parameter: Parameter) -> dict[str, Any]:
    return {
        "index": parameter.index,
        "name": parameter.name,
        "shape": parameter.shape,
        "route": parameter.route,
        "reason": parameter.reason,
    }


def parameter_step_json(step: int, norm: bytes) -> dict[str, Any]:
    """Return one parameter's packed norm after a step; null where it was not measured."""
    value = float(np.frombuffer(norm, "<f4")[0]) if len(norm) == 4 else None
    return {"step": step, "momentum_norm": encode_number(value)}


def series_json(columns: StepColumns) -> dict[str, Any]:
    """Return columns for a chart, every step of them."""
    series = {name: (columns.values[name], columns.measured[name]) for name in columns.values}
    return {**_series(columns.step, series), **_runs(Marks.of(columns), list(columns.values)), "exact": True}


def thinned_json(outline: Outline | StepColumns, max_points: int) -> dict[str, Any]:
    """Return columns for a chart, of each bucket of steps the extremes."""
    if isinstance(outline, Outline):
        thinned, marks = thin_outline(outline, max_points), outline.marks
    else:
        thinned, marks = thin(outline, max_points), Marks.of(outline)
    return {**_series(*thinned), **_runs(marks, list(outline.values)), "exact": False}


def parameter_series_json(document: dict[str, Any]) -> dict[str, Any]:
    """Leave of columns for a chart what one parameter has of its own."""
    return {name: document[name] for name in ("series", "nonfinite_runs", "exact")}


def _series(steps: Integers, series: dict[str, tuple[Floats, Flags]]) -> dict[str, Any]:
    return {
        "series": {
            "step": steps.tolist(),
            **{name: _numbers(name, values, present) for name, (values, present) in series.items()},
        }
    }


def _runs(marks: Marks, names: Sequence[str]) -> dict[str, Any]:
    return {
        "overflow_runs": run_lengths(marks.overflow, marks.step),
        "discarded_runs": run_lengths(marks.discarded, marks.step),
        "nonfinite_runs": {
            name: [
                {"first": first, "last": last, "value": KIND_NAMES[kind]}
                for first, last, kind in (kind_lengths(marks.kinds[name], marks.step) if name in marks.kinds else ())
            ]
            for name in names
        },
    }


def _numbers(name: str, values: Floats, present: Flags) -> list[float | int | str | None]:
    if name in COUNTS:
        return [int(value) if is_there else None for value, is_there in zip(values, present, strict=True)]
    plain: list[float | int | str | None] = values.tolist()
    for place in np.flatnonzero(~np.isfinite(values)).tolist():
        plain[place] = encode_number(float(values[place])) if present[place] else None
    return plain
