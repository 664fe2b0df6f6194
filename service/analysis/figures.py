"""A built-in experiment's runs beside what is published of them: a figure a run, as text, and what differs. Pure.

thirty-step, byte-gpt    verdict, what moved, momentum, overflows, scale
calm-boom,               momentum norms of both matrices over the discarded step
mixed-overflow
gradient-accumulation    Newton-Schulz calls, and the distance of four micro-batches from one batch
scale-change             the distance from the run at a fixed loss scale, over how far that run's weights moved
dtype-assertion          what moved, and what a comparison with the model before its cast calls moved
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from muonscope.contract.published import (
    BYTE_GPT,
    CALM_BOOM,
    CALM_BOOM_STEPS,
    DTYPE_ASSERTION,
    GRADIENT_ACCUMULATION,
    LEAST_DISPLACEMENT,
    MIXED_OVERFLOW,
    NORM_RTOL,
    SCALE_CHANGE,
    THIRTY_STEP,
    Published,
    accumulation_figures,
    calm_boom_norms,
    check_label,
    published_result,
)
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind, Implementation, Precision, RunStatus, StepOrdering, Verdict
from service.columns import Floats

READ_STEPS: Final = 16
"""Of so many steps `Readings` holds norms and counts: more than any experiment here that looks at them has."""
_COUNTED_STEPS: Final = 2
# Weights and biases of five linears.
_ASSERTED_PARAMETERS: Final = 10


@dataclass(frozen=True, slots=True)
class Readings:
    """What some figures are made of beyond a run's summary; empty or None where not measured."""

    norms: tuple[tuple[float, ...], ...] = ()
    """Momentum norms by step, by parameter."""
    ns_calls: tuple[int | None, ...] = ()
    """By step, over all ranks."""
    weights: Floats | None = None
    """All of them, by parameter."""
    parameters_hash: str | None = None
    motion: float | None = None
    """2-norm of what all weights moved."""
    changed_before_cast: int | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a row is made of: a run and what its record shows so far."""

    run_id: str
    spec: Mapping[str, Any]
    status: RunStatus
    verdict: Verdict | None
    verdict_step: int | None
    steps: int
    overflows: int
    final_loss_scale: float | None
    parameters_moved: int | None
    parameters_total: int | None
    momentum_finite: bool | None
    max_weight_motion: float | None
    failure: FailureKind | None = None
    readings: Readings = Readings()


@dataclass(frozen=True, slots=True)
class Figure:
    """What a run shows, what is known of it, and where the two part; empty texts where there is nothing to say."""

    measured: str = ""
    known: str = ""
    differences: tuple[str, ...] = ()


_CHECKED: Final = {
    # How far the weights move differs by processor.
    THIRTY_STEP: (
        "outcome, what moved and momentum; of runs that die also overflows and final loss scale; "
        "of the weight motion only whether there is any"
    ),
    BYTE_GPT: "whether it dies or trains",
    CALM_BOOM: "the momentum norms of both matrices over the discarded step",
    MIXED_OVERFLOW: "the momentum norms of both matrices over the discarded step",
    GRADIENT_ACCUMULATION: "Newton-Schulz calls, and how far four micro-batches end from one batch",
    SCALE_CHANGE: "how far the weights end from those at a fixed loss scale",
    DTYPE_ASSERTION: "what moved, and what a comparison with the model before its cast calls moved",
}


def checked(experiment: str | None) -> str:
    """Return what of a run the named built-in experiment holds against the known figures; empty where rows differ."""
    return _CHECKED.get(experiment or "", "")


def figure(experiment: str, result: RunResult, results: Sequence[RunResult]) -> Figure | None:
    """Return a run's figure in the named built-in experiment.

    Args:
        experiment: its name.
        result: the run.
        results: all runs of the experiment, among them the one that this one is compared with.
    Returns:
        None where nothing is known of such a run.
    """
    make = _FIGURES.get(experiment)
    if make is None:
        return None
    spec = RunSpec.model_validate(result.spec)
    made = make(experiment, result, spec, results)
    # The figures are those of the experiment's own runs; under a release they say what it does, and are held to none.
    return made if made is None or spec.deepspeed is None else Figure(made.measured)


def _summary(experiment: str, result: RunResult, spec: RunSpec, _: Sequence[RunResult]) -> Figure | None:
    published = published_result(experiment, spec)
    if published is None:
        return None
    measured = _said(
        result.verdict, result.verdict_step, result.parameters_moved, result.parameters_total, result.overflows
    )
    known = _said(
        published.verdict, published.verdict_step, published.parameters_moved, published.parameters_total,
        published.overflows,
    )  # fmt: skip
    return Figure(measured, known, tuple(_differences(published, result, check_label(experiment))))


def _said(
    verdict: Verdict | None, step: int | None, moved: int | None, total: int | None, overflows: int | None
) -> str:
    parts = [] if verdict is None else [str(verdict) if step is None else f"{verdict} at step {step}"]
    parts += [f"{moved}/{total} moved"] if moved is not None and total is not None else []
    parts += [f"{overflows} overflows"] if overflows is not None else []
    return ", ".join(parts)


def _differences(published: Published, result: RunResult, label: str) -> list[str]:
    pairs = (
        ("verdict", published.verdict, result.verdict),
        ("verdict step", published.verdict_step, result.verdict_step),
        ("parameters moved", published.parameters_moved, result.parameters_moved),
        ("parameters", published.parameters_total, result.parameters_total),
        ("momentum finite", published.momentum_finite, result.momentum_finite),
        ("overflows", published.overflows, result.overflows),
        ("final scale", published.final_loss_scale, result.final_loss_scale),
    )
    found = [
        f"{name} is {display(actual)}, {label} {display(expected)}"
        for name, expected, actual in pairs
        if expected is not None and expected != actual
    ]
    least, most, motion = published.least_weight_motion, published.most_weight_motion, result.max_weight_motion
    is_bounded = least > 0 or most is not None
    if is_bounded and (motion is None or not least <= motion <= (math.inf if most is None else most)):
        found.append(f"largest weight motion is {display(motion)}, {label} {least:g} to {display(most) or 'any'}")
    return found


def _calm_boom(_: str, result: RunResult, spec: RunSpec, __: Sequence[RunResult]) -> Figure:
    known = calm_boom_norms(spec.implementation, spec.step_ordering)
    measured = result.readings.norms[:CALM_BOOM_STEPS]
    differences = []
    for position, name in enumerate(("calm", "boom")):
        for step, norms in enumerate(known):
            actual = measured[step][position] if step < len(measured) and position < len(measured[step]) else None
            if actual is None or not _is_close(actual, norms[position], NORM_RTOL):
                differences.append(f"{name} is {_norm(actual)} after step {step}, published {_norm(norms[position])}")
    holds_bits = spec.step_ordering in (StepOrdering.PRECHECK, StepOrdering.DEFERRED, StepOrdering.ORDERED)
    if holds_bits and len(measured) > 1 and measured[0] != measured[1]:
        differences.append(f"the discarded step moved the norms from {measured[0]} to {measured[1]}, published: no bit")
    return Figure(_histories(measured), _histories(known), tuple(differences))


def _histories(norms: Sequence[Sequence[float]]) -> str:
    named = [
        (name, [step[place] for step in norms if len(step) > place]) for place, name in enumerate(("calm", "boom"))
    ]
    return "; ".join(f"{name} {' → '.join(map(_norm, history))}" for name, history in named if history)


def _accumulation(_: str, result: RunResult, spec: RunSpec, results: Sequence[RunResult]) -> Figure:
    known = accumulation_figures(spec.implementation, spec.step_ordering)
    counts = result.readings.ns_calls[:_COUNTED_STEPS]
    told = [count for count in counts if count is not None]
    calls = sum(told) if len(told) == _COUNTED_STEPS else None
    is_window = spec.gradient_accumulation_steps > 1
    one_batch = _counterpart(result, results, "gradient_accumulation_steps", lambda other: other == 1)
    distance = _distance(result, one_batch, relative_to_motion=False)
    said_calls = "calls not measured" if calls is None else f"{calls} calls"
    measured = f"{said_calls} in two steps"
    if is_window:
        measured += f", {_short(distance)} from one batch"
    if known is None:
        return Figure(measured)
    expected_calls = known.ns_calls if is_window else 2 * _COUNTED_STEPS
    differences = [] if calls == expected_calls else [f"{said_calls}, published {expected_calls}"]
    said = f"{expected_calls} calls in two steps"
    if is_window:
        bound = known.tolerance == 0
        passes = distance is not None and (
            distance <= known.distance if bound else _is_close(distance, known.distance, known.tolerance)
        )
        said += f", {'at most ' if bound else ''}{known.distance:.4g} from one batch"
        if not passes:
            differences.append(f"{_short(distance)} from one batch, published {known.distance:.4g}")
    return Figure(measured, said, tuple(differences))


def _scale_change(_: str, result: RunResult, spec: RunSpec, results: Sequence[RunResult]) -> Figure:
    if spec.loss_scale.static is not None:
        known, scale = "the scale does not move", result.final_loss_scale
        measured = "not measured" if scale is None else f"the scale is {display(scale)} at the end"
        if scale == spec.loss_scale.static:
            measured = known
        return Figure(measured, known, () if measured == known else (f"{measured}, expected {known}",))
    fixed = _counterpart(result, results, "loss_scale", lambda other: other["static"] is not None)
    distance = _distance(result, fixed, relative_to_motion=True)
    same_norms = fixed is not None and bool(result.readings.norms) and result.readings.norms == fixed.readings.norms
    same_weights = (
        fixed is not None
        and result.readings.parameters_hash is not None
        and result.readings.parameters_hash == fixed.readings.parameters_hash
    )
    measured = "equal to the last bit" if same_norms and same_weights else f"{_percent(distance)} off"
    if spec.implementation is Implementation.MUON_CORE:
        known = "equal to the last bit"
        return Figure(measured, known, () if measured == known else (f"{measured}, expected {known}",))
    known = f"at least {_percent(LEAST_DISPLACEMENT)} off"
    is_off = distance is not None and distance >= LEAST_DISPLACEMENT
    return Figure(measured, known, () if is_off else (f"{measured}, expected {known}",))


def _dtype_assertion(_: str, result: RunResult, spec: RunSpec, __: Sequence[RunResult]) -> Figure:
    total, trains = result.parameters_total, spec.optimizer.lr > 0
    known_moved = _ASSERTED_PARAMETERS if trains else 0
    # Casting to a shorter dtype changes every parameter, trained or not.
    known_changed = _ASSERTED_PARAMETERS if trains or spec.precision is not Precision.FP32 else 0
    moved, changed = result.parameters_moved, result.readings.changed_before_cast
    differences = [
        f"{name} {display(actual)}, published {display(known)}"
        for name, actual, known in (("moved", moved, known_moved), ("asserted", changed, known_changed))
        if actual != known or actual is None
    ]
    known = _assertion(known_moved, known_changed, _ASSERTED_PARAMETERS)
    return Figure(_assertion(moved, changed, total), known, tuple(differences))


def _assertion(moved: int | None, changed: int | None, total: int | None) -> str:
    if moved is None or changed is None or total is None:
        return "not measured"
    said = "passes" if changed == total else "fails"
    return f"{display(moved)}/{display(total)} moved, the assertion {said} ({display(changed)}/{display(total)})"


def _counterpart(
    result: RunResult, results: Sequence[RunResult], field: str, is_wanted: Callable[[Any], bool]
) -> RunResult | None:
    """Find the run that differs from this one in the field alone; what a batch is cut into goes with its number."""
    left_out = {"name", "micro_batch_size", field}

    def rest(spec: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in spec.items() if key not in left_out}

    mine = rest(result.spec)
    return next((each for each in results if is_wanted(each.spec[field]) and rest(each.spec) == mine), None)


def _distance(result: RunResult, other: RunResult | None, *, relative_to_motion: bool) -> float | None:
    if other is None or result.readings.weights is None or other.readings.weights is None:
        return None
    one, two = result.readings.weights, other.readings.weights
    if one.shape != two.shape:
        return None
    size = other.readings.motion if relative_to_motion else float(np.linalg.norm(two))
    return float(np.linalg.norm(one - two)) / size if size else None


def _is_close(actual: float, known: float, tolerance: float) -> bool:
    if math.isnan(known) or math.isinf(known):
        return actual == known or (math.isnan(actual) and math.isnan(known))
    return math.isclose(actual, known, rel_tol=tolerance)


def _norm(norm: float | None) -> str:
    return "not measured" if norm is None else f"{norm:.4f}"


def _short(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{100 * share:.1f} %"


def display(cell: str | float | int | bool | None) -> str:
    """Return a cell as people read it: six digits at most, yes and no, nothing where not measured."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return str(cell)


_FIGURES: Final[dict[str, Callable[[str, RunResult, RunSpec, Sequence[RunResult]], Figure | None]]] = {
    THIRTY_STEP: _summary,
    BYTE_GPT: _summary,
    CALM_BOOM: _calm_boom,
    MIXED_OVERFLOW: _calm_boom,
    GRADIENT_ACCUMULATION: _accumulation,
    SCALE_CHANGE: _scale_change,
    DTYPE_ASSERTION: _dtype_assertion,
}
