"""What two runs differ in: their specs, the first step that is not equal to the last bit, and what came of it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from muonscope.contract.attempts import FinalState
from muonscope.contract.run_spec import FIELDS_WITHOUT_NUMBERS
from muonscope.contract.spec_facts import has_loss_scale, has_muon_optimizer
from muonscope.contract.status import Implementation, MomentumUnit
from muonscope.contract.telemetry import COUNTS, SCALARS, encode_number
from service.analysis.learning import caveat, learned, lower_to_the_end
from service.analysis.quantities import clipping, is_recorded, meaning
from service.columns import FINITE, Flags, Integers, StepColumns, norms_matrix, run_lengths

# In the order in which a step computes them: the first that differs is the cause, the rest follow from it.
COMPARED: Final = (
    "loss_scale_before", "loss", "grad_norm", "overflow", "discarded", "momentum_norm", "update_norm",
    "loss_scale_after", "lr", "nonfinite_parameters",
)  # fmt: skip
FLAGS: Final = ("overflow", "discarded")
PER_PARAMETER: Final = "momentum_norm"
"""The one that every parameter has its own of."""
SERIES: Final = (*SCALARS, *COUNTS)
"""The series that a side of the comparison reads."""
MAX_SCALE_CHANGES: Final = 1000
MAX_ROUTES: Final = 100


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    spec: Mapping[str, Any]
    columns: StepColumns
    """The series of SERIES, every step."""
    momentum_unit: MomentumUnit | None = None
    data_hash: str | None = None
    initial_parameters_hash: str | None = None
    final: FinalState | None = None
    parameter_names: Sequence[str] = ()
    routes: Mapping[str, str] = field(default_factory=dict)
    """Which optimizer takes each parameter, by the parameter's name; empty where the run has not told."""

    def at(self, step: int) -> int:
        """Return the row of a step that the record holds."""
        return int(np.searchsorted(self.columns.step, step))


_NOTHING_SHARED: Final = "The two records have no step in common, and so nothing to compare."


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step at which two records are not bit-equal."""

    step: int
    scalars: tuple[str, ...]
    """All that differ there, in the order a step computes them."""
    is_end: bool = False
    """Nothing differs; one record ends here, or has a gap."""


def spec_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the fields that can change the numbers and differ, by dotted name; a missing one is null."""
    flat_a, flat_b = _flatten(a), _flatten(b)
    differing = {
        field: (flat_a.get(field), flat_b.get(field))
        for field in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(field) != flat_b.get(field) and field.partition(".")[0] not in FIELDS_WITHOUT_NUMBERS
    }
    has_muon = has_muon_optimizer(a) or has_muon_optimizer(b)
    return [
        {"field": field, "a": values[0], "b": values[1]}
        for field, values in differing.items()
        if has_muon or differing.get(_of_adam(field)) != values
    ]


def _of_adam(field: str) -> str:
    """Name the field in which a recording whose optimizer is Adam alone says a setting of it a second time."""
    return f"optimizer.adam.{field.removeprefix('optimizer.')}"


def _flatten(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def first_divergence(a: Side, b: Side) -> Divergence | None:
    """Find the first step that both recorded and that is not bit-equal; values that one did not measure say nothing.

    Returns:
        None where the records are equal, ends included.
    """
    common, rows_a, rows_b = np.intersect1d(a.columns.step, b.columns.step, assume_unique=True, return_indices=True)
    different = {
        name: _differs(a.columns, b.columns, name, rows_a, rows_b) for name in COMPARED if is_comparable(a, b, name)
    }
    any_different = np.logical_or.reduce(list(different.values())) if len(common) else np.zeros(0, np.bool_)
    if any_different.any():
        place = int(np.argmax(any_different))
        return Divergence(int(common[place]), tuple(name for name, flags in different.items() if flags[place]))
    lone = np.setxor1d(a.columns.step, b.columns.step, assume_unique=True)
    return Divergence(int(lone[0]), (), is_end=True) if len(lone) else None


def is_comparable(a: Side, b: Side, name: str) -> bool:
    """Whether both runs recorded the same quantity under this name."""
    return meaning(name, a.spec, a.momentum_unit) == meaning(name, b.spec, b.momentum_unit)


def _not_compared(a: Side, b: Side) -> list[dict[str, Any]]:
    return [
        {"quantity": name, **{key: meaning(name, side.spec, side.momentum_unit) for key, side in (("a", a), ("b", b))}}
        for name in COMPARED
        if not is_comparable(a, b, name) and _is_measured(a, name) and _is_measured(b, name)
    ]


def _is_measured(side: Side, name: str) -> bool:
    return name in FLAGS or (is_recorded(name, side.spec) and bool(side.columns.measured[name].any()))


def _differs(a: StepColumns, b: StepColumns, name: str, rows_a: Integers, rows_b: Integers) -> Flags:
    if name in FLAGS:
        flags: Flags = getattr(a, name)[rows_a] != getattr(b, name)[rows_b]
        return flags
    both = a.measured[name][rows_a] & b.measured[name][rows_b]
    one, other = a.values[name][rows_a], b.values[name][rows_b]
    different: Flags = both & ~((one == other) | (np.isnan(one) & np.isnan(other)))
    return different


def differing_parameters(a: bytes, b: bytes) -> list[int]:
    """Return the indexes of the parameters whose packed norms differ, the largest difference first."""
    norms = norms_matrix([a, b])
    if norms is None or not norms.size:
        return []
    one, other = norms.astype(np.float64)
    differs = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    with np.errstate(invalid="ignore"):
        size = np.nan_to_num(np.abs(one - other), nan=np.inf)
    at = np.flatnonzero(differs)
    ordered: list[int] = at[np.argsort(-size[at], kind="stable")].tolist()
    return ordered


def compare(a: Side, b: Side, parameters: Sequence[int] = ()) -> dict[str, Any]:
    """Describe what two runs differ in.

    Args:
        a: one run.
        b: the other.
        parameters: indexes of the parameters that differ at the first divergence, the most different first.
    """
    difference = spec_difference(a.spec, b.spec)
    divergence = first_divergence(a, b)
    explanation = _explain(divergence, a, b, difference) if _share_steps(a, b) else _NOTHING_SHARED
    is_same_data = _equal(a.data_hash, b.data_hash)
    return {
        "spec_difference": difference,
        "is_pair": len(difference) == 1,
        "shared": {
            "data": is_same_data,
            "initial_parameters": _equal(a.initial_parameters_hash, b.initial_parameters_hash),
        },
        "bit_equal_until": divergence.step if divergence is not None else _end(a, b),
        "first_divergence": _divergence_json(divergence, a, b, parameters),
        "explanation": explanation + _tasks_differ(difference),
        "not_compared": _not_compared(a, b),
        "routes": _routes(a, b),
        "clipping": {"a": clipping(a.spec, a.columns), "b": clipping(b.spec, b.columns)},
        "learning": {
            "a": learned(a.columns),
            "b": learned(b.columns),
            "lower": lower_to_the_end(a.columns, b.columns),
            "caveat": caveat(a.spec, b.spec, is_same_data),
        },
        "discarded": _discarded(a.columns, b.columns),
        "loss_scale": {"a": _trajectory(a), "b": _trajectory(b)},
        "final": _final(a, b),
        "cost": _cost(a, b),
    }


def _routes(a: Side, b: Side) -> dict[str, Any] | None:
    """Which parameters another optimizer takes in one run than in the other; None where a run has not told its own."""
    if not a.routes or not b.routes:
        return None
    differing = [name for name, route in a.routes.items() if b.routes.get(name, route) != route]
    return {
        "num_differing": len(differing),
        "differing": [{"parameter": name, "a": a.routes[name], "b": b.routes[name]} for name in differing[:MAX_ROUTES]],
    }


def _end(a: Side, b: Side) -> int | None:
    ends = [int(side.columns.step[-1]) + 1 for side in (a, b) if len(side.columns)]
    return min(ends) if len(ends) == 2 else None


def _equal(a: Any, b: Any) -> bool | None:
    return None if a is None or b is None else a == b


def _divergence_json(divergence: Divergence | None, a: Side, b: Side, parameters: Sequence[int]) -> Any:
    if divergence is None or divergence.is_end:
        return None
    scalar = divergence.scalars[0]
    names = a.parameter_names or b.parameter_names
    first = parameters[0] if parameters else None
    return {
        "step": divergence.step,
        "scalar": scalar,
        "scalars": list(divergence.scalars),
        "a": _value(a, scalar, divergence.step),
        "b": _value(b, scalar, divergence.step),
        "parameter": names[first] if first is not None and first < len(names) else None,
        "parameters_differing": len(parameters),
    }


def _value(side: Side, name: str, step: int) -> Any:
    columns, row = side.columns, side.at(step)
    if name in FLAGS:
        return bool(getattr(columns, name)[row])
    return encode_number(float(columns.values[name][row])) if columns.measured[name][row] else None


def _share_steps(a: Side, b: Side) -> bool:
    return bool(np.isin(a.columns.step, b.columns.step).any())


_BEFORE_THE_CHECK: Final = frozenset({"loss_scale_before", "loss", "lr"})
"""What differs in these does so whatever a step does about an overflow."""


def _tasks_differ(difference: Sequence[Mapping[str, Any]]) -> str:
    """Say that the runs train different tasks: then no step of theirs can be held against the other's."""
    for entry in difference:
        if entry["field"] == "task.name":
            return f" The tasks differ: {entry['a']} and {entry['b']}."
    return ""


def _explain(divergence: Divergence | None, a: Side, b: Side, difference: Sequence[Mapping[str, Any]]) -> str:
    # What is not the same quantity in both has not been found equal.
    records = "What both record of the same quantities is" if _not_compared(a, b) else "The two records are"
    if divergence is None:
        return f"{records} equal, step by step, to the last bit."
    if divergence.is_end:
        return f"{records} equal to the last bit {_where_one_lacks_a_step(divergence.step, a, b)}."
    step, scalar = divergence.step, divergence.scalars[0]
    begin = f"The records first differ at step {step}, in {scalar.replace('_', ' ')}"
    overflowed = [bool(side.columns.overflow[side.at(step)]) for side in (a, b)]
    discarded = all(side.columns.discarded[side.at(step)] for side in (a, b))
    left_otherwise = PER_PARAMETER in divergence.scalars and not _BEFORE_THE_CHECK & set(divergence.scalars)
    if all(overflowed) and discarded and left_otherwise:
        return f"{begin}: both overflowed, and the step is discarded; what it left in the momentum differs."
    clips = any(side.spec.get("gradient_clipping") for side in (a, b))
    ordering_differs = any(entry["field"] == "step_ordering" for entry in difference)
    ours = all(side.spec.get("implementation") == Implementation.MUON_CORE for side in (a, b))
    if not any(overflowed) and clips and ordering_differs and ours:
        return f"{begin}, without an overflow: the orderings clip different things, and gradient_clipping is not 0."
    names = ", ".join(str(entry["field"]) for entry in difference)
    return f"{begin}; the specs differ in {names}." if names else f"{begin}, though the specs do not differ."


def _where_one_lacks_a_step(step: int, a: Side, b: Side) -> str:
    if step > min(int(side.columns.step[-1]) for side in (a, b)):
        return f"until one of them ends before step {step}"
    begin = max(int(side.columns.step[0]) for side in (a, b))
    lacks = f"begins only at step {begin}" if step < begin else f"lacks step {step}"
    return f"on the steps that both hold; one of them {lacks}"


def _discarded(a: StepColumns, b: StepColumns) -> dict[str, Any]:
    steps_a, steps_b = a.step[a.discarded], b.step[b.discarded]
    return {
        "a": len(steps_a),
        "b": len(steps_b),
        "both": len(np.intersect1d(steps_a, steps_b, assume_unique=True)),
        "a_runs": run_lengths(a.discarded, a.step)[:MAX_SCALE_CHANGES],
        "b_runs": run_lengths(b.discarded, b.step)[:MAX_SCALE_CHANGES],
        "overflows": {"a": int(a.overflow.sum()), "b": int(b.overflow.sum())},
    }


def _trajectory(side: Side) -> dict[str, Any]:
    columns = side.columns
    measured = columns.measured["loss_scale_before"] & has_loss_scale(side.spec)
    scales, steps = columns.values["loss_scale_before"][measured], columns.step[measured]
    if not len(scales):
        return {"initial": None, "final": None, "lowest": None, "highest": None, "num_changes": 0, "changes": []}
    after = columns.values["loss_scale_after"][-1] if columns.measured["loss_scale_after"][-1] else scales[-1]
    # What the last step changes it to would be the next one's.
    scales, steps = np.append(scales, after), np.append(steps, columns.step[-1] + 1)
    at = np.flatnonzero(scales[1:] != scales[:-1]) + 1
    return {
        "initial": encode_number(float(scales[0])),
        "final": encode_number(float(after)),
        "lowest": encode_number(float(scales.min())),
        "highest": encode_number(float(scales.max())),
        "num_changes": len(at),
        "changes": [[int(steps[place]), encode_number(float(scales[place]))] for place in at[:MAX_SCALE_CHANGES]],
    }


def _final(a: Side, b: Side) -> dict[str, Any]:
    answer = {name: _pair(_last(a.columns, name), _last(b.columns, name)) for name in ("loss", "momentum_norm")}
    if not is_comparable(a, b, "momentum_norm"):
        answer["momentum_norm"]["difference"] = None
    scales = [_last(side.columns, "loss_scale_after") if has_loss_scale(side.spec) else None for side in (a, b)]
    answer["loss_scale_after"] = _pair(*scales)
    for name in ("parameters_moved", "parameters_total", "max_weight_motion", "nonfinite_parameters"):
        answer[name] = _pair(*(getattr(side.final, name) if side.final is not None else None for side in (a, b)))
    hashes = [side.final.final_parameters_hash if side.final is not None else None for side in (a, b)]
    steps = {"a": len(a.columns), "b": len(b.columns)}
    return {**answer, "steps": steps, "parameters_equal": _equal(hashes[0], hashes[1])}


def _last(columns: StepColumns, name: str) -> float | None:
    at = np.flatnonzero(columns.measured[name])
    return float(columns.values[name][at[-1]]) if len(at) else None


def _pair(a: float | None, b: float | None) -> dict[str, Any]:
    finite = a is not None and b is not None and np.isfinite([a, b]).all()
    difference = b - a if finite and a is not None and b is not None else None
    return {"a": encode_number(a), "b": encode_number(b), "difference": difference}


def _cost(a: Side, b: Side) -> dict[str, Any]:
    calls = _ratio(_sum(a.columns, "ns_calls"), _sum(b.columns, "ns_calls"))
    if not np.array_equal(a.columns.step, b.columns.step):
        # More calls over more steps cost nothing more.
        calls["ratio"] = None
    memory = [side.final.peak_memory_bytes if side.final is not None else None for side in (a, b)]
    return {
        "step_time_s": _ratio(_median(a.columns, "step_time_s"), _median(b.columns, "step_time_s")),
        "peak_memory_bytes": _ratio(*memory),
        "ns_calls": calls,
    }


def _median(columns: StepColumns, name: str) -> float | None:
    values = columns.values[name][columns.measured[name] & (columns.kinds(name) == FINITE)]
    # The first step pays for set-up and compilation.
    values = values[1:] if len(values) > 1 else values
    return float(np.median(values)) if len(values) else None


def _sum(columns: StepColumns, name: str) -> int | None:
    measured = columns.measured[name]
    return int(columns.values[name][measured].sum()) if measured.any() else None


def _ratio(a: float | None, b: float | None) -> dict[str, Any]:
    """Two costs, and how many times a's b's is."""
    return {"a": a, "b": b, "ratio": b / a if a and b is not None else None}
