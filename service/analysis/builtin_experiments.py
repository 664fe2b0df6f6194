"""The built-in experiments: questions whose answers are known, to be run anywhere. Pure.

thirty-step   stage × initial loss scale × ordering: master dies at the high scale, all else trains
byte-gpt      a small GPT on real text, both orderings, at a high initial scale and at a calm one
calm-boom     one matrix overflows on step 1 and the other stays finite: what each leaves in its momentum
mixed-overflow          the same under every ordering of both implementations
gradient-accumulation   four micro-batches against one batch, at stage 3
scale-change            a loss scale that halves, falls sixteenfold or grows, against one that stays
dtype-assertion         the assertion "every parameter changed", with and without training
published-tables        thirty-step and the last four, in one table
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from muonscope.contract.published import (
    BYTE_GPT,
    CALM_BOOM,
    DTYPE_ASSERTION,
    GRADIENT_ACCUMULATION,
    MIXED_OVERFLOW,
    PUBLISHED_TABLES,
    SCALE_CHANGE,
    THIRTY_STEP,
)
from muonscope.contract.releases import RELEASES
from muonscope.contract.status import StepOrdering
from service.analysis.matrix import Cell, expand
from service.errors import InvalidInput

# Far above what any gradient survives, so that the first steps overflow whatever the text.
_HIGH_POWER: Final = 24
_CALM_POWER: Final = 8


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in experiment, ready to be queued."""

    name: str
    base: dict[str, Any]
    matrix: dict[str, list[Any]]
    """What varies; empty where the cells are no full matrix."""
    cells: list[Cell]


def build(name: str, options: Mapping[str, Any]) -> Builtin:
    """Return the built-in experiment of this name.

    Raises:
        InvalidInput: no such experiment, or an option it does not take.
    """
    if name not in _BUILDERS:
        raise InvalidInput(
            f"there is no built-in experiment {name[:100]!r}", field="builtin", value=name,
            remedy=f"use one of {', '.join(_BUILDERS)}",
        )  # fmt: skip
    builder, own = _BUILDERS[name]
    known = (*own, *_COMMON_OPTIONS)
    for option, value in options.items():
        if option not in known:
            raise InvalidInput(
                f"{name} does not take the option {option}", field=option, value=value,
                remedy=f"remove it; it takes {', '.join(known)}",
            )  # fmt: skip
    return _with_resources(_under_release(builder(name, options), options), options)


def _under_release(builtin: Builtin, options: Mapping[str, Any]) -> Builtin:
    """Run the experiment under an unmodified DeepSpeed release, whose ordering is its own.

    Runs that differ in implementation or ordering alone become one, and those at a stage that the release's Muon does
    not have are left out.
    """
    version = options.get("deepspeed")
    if version is None:
        return builtin
    if not isinstance(version, str) or version not in RELEASES:
        raise InvalidInput(
            f"DeepSpeed {version!r} is not on the allow-list"[:200], field="deepspeed", value=version,
            remedy=f"use one of {', '.join(RELEASES)}",
        )  # fmt: skip
    release, cells = RELEASES[version], list[Cell]()
    for cell in builtin.cells:
        spec = {**_without_ordering(cell.spec), "deepspeed": {"version": version}}
        spec["name"] = _ORDERING_WORDS.sub("", str(cell.spec.get("name", builtin.name)))
        is_new = all(spec != other.spec for other in cells)
        if is_new and spec.get("zero_stage", 1) in release.orderings:
            cells.append(Cell(_without_ordering(cell.values), spec))
    if not cells:
        raise InvalidInput(
            f"{builtin.name} has no run at a ZeRO stage that DeepSpeed {version}'s Muon has", field="deepspeed",
            value=version, remedy="choose a later release",
        )  # fmt: skip
    base = {**_without_ordering(builtin.base), "deepspeed": {"version": version}}
    return Builtin(builtin.name, base, _without_ordering(builtin.matrix), cells)


def _without_ordering(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field not in ("implementation", "step_ordering")}


def _with_resources(builtin: Builtin, options: Mapping[str, Any]) -> Builtin:
    """Say what the runs stand on; it changes none of their numbers, so what is published still holds."""
    share = options.get("gpus_per_rank")
    if share is None:
        return builtin
    resources = {"resources": {"gpus_per_rank": share}}
    cells = [Cell(cell.values, cell.spec | resources) for cell in builtin.cells]
    return Builtin(builtin.name, builtin.base | resources, builtin.matrix, cells)


def _thirty_step(name: str, _: Mapping[str, Any]) -> Builtin:
    base = {
        "task": {"name": "simple_model", "hidden_size": 128, "num_layers": 5, "fixed_batch": True},
        "world_size": 2,
        "precision": "fp16",
        "optimizer": {"lr": 0.05},
        "gradient_clipping": 0.0,
        "micro_batch_size": 4,
        "steps": 30,
    }
    matrix: dict[str, list[Any]] = {
        "zero_stage": [1, 2],
        "loss_scale.initial_power": [16, 0],
        "step_ordering": ["master", "ordered"],
    }
    return Builtin(name, base, matrix, expand(base, matrix, name=name))


def _byte_gpt(name: str, options: Mapping[str, Any]) -> Builtin:
    text = options.get("text")
    if text is not None and not isinstance(text, str):
        raise InvalidInput("text is a path", field="text", value=text, remedy="give a file or folder, or leave it out")
    base = {
        "task": {"name": "byte_gpt", "text": text},
        "world_size": 2,
        "precision": "fp16",
        "micro_batch_size": 4,
        "steps": 60,
    }
    matrix: dict[str, list[Any]] = {
        "loss_scale.initial_power": [_HIGH_POWER, _CALM_POWER],
        "step_ordering": ["master", "ordered"],
    }
    return Builtin(name, base, matrix, expand(base, matrix, name=name))


_CALM_BOOM_BASE: Final[dict[str, Any]] = {
    "task": {"name": "calm_boom", "width": 32, "overflow_step": 1},
    "world_size": 1,
    "precision": "fp16",
    "loss_scale": {"initial_power": 4},
    "optimizer": {"lr": 0.01, "momentum": 0.9},
    "micro_batch_size": 1,
    "steps": 4,
}
_NATIVE: Final = [ordering.value for ordering in StepOrdering if ordering is not StepOrdering.ORDERED]


def _calm_boom(name: str, _: Mapping[str, Any]) -> Builtin:
    # Each implementation offers orderings of its own.
    cells = [
        *_cells(
            name, _CALM_BOOM_BASE, implementation=["deepspeed"], step_ordering=["master", "per_tensor", "deferred"]
        ),
        *_cells(name, _CALM_BOOM_BASE, implementation=["muon_core"], step_ordering=["master", "ordered"]),
    ]
    return Builtin(name, _CALM_BOOM_BASE, {}, cells)


def _mixed_overflow(name: str, _: Mapping[str, Any]) -> Builtin:
    every = [ordering.value for ordering in StepOrdering]
    cells = [
        *_cells(name, _CALM_BOOM_BASE, implementation=["deepspeed"], zero_stage=[1], step_ordering=_NATIVE),
        *_cells(name, _CALM_BOOM_BASE, implementation=["deepspeed"], zero_stage=[3], step_ordering=["deferred"]),
        *_cells(name, _CALM_BOOM_BASE, implementation=["muon_core"], zero_stage=[1], step_ordering=every),
        *_cells(name, _CALM_BOOM_BASE, implementation=["muon_core"], zero_stage=[3], step_ordering=["ordered"]),
    ]
    return Builtin(name, _CALM_BOOM_BASE, {}, cells)


def _gradient_accumulation(name: str, _: Mapping[str, Any]) -> Builtin:
    base = {
        "task": {"name": "matrix_pair", "width": 64},
        "zero_stage": 3,
        "world_size": 2,
        "precision": "fp32",
        "optimizer": {"lr": 0.02, "momentum": 0.95},
        "steps": 3,
    }
    cells = [
        cell
        for implementation, ordering in (("muon_core", "master"), ("muon_core", "ordered"), ("deepspeed", "deferred"))
        for window in (1, 4)
        for cell in _cells(
            name,
            {**base, "micro_batch_size": 8 // window},
            implementation=[implementation],
            step_ordering=[ordering],
            gradient_accumulation_steps=[window],
        )
    ]
    return Builtin(name, base, {}, cells)


def _scale_change(name: str, _: Mapping[str, Any]) -> Builtin:
    base = {
        "task": {"name": "matrix_pair", "width": 64},
        "world_size": 1,
        "precision": "fp16",
        "micro_batch_size": 8,
        "optimizer": {"lr": 0.02, "momentum": 0.95},
    }
    power = 12
    # By what moves the scale: its settings, and the steps that are made to overflow. A planted overflow costs a step
    # at any scale, so the run at a fixed scale has the same ones.
    changes: dict[str, tuple[dict[str, Any], list[int]]] = {
        "halves": ({"initial_power": power, "hysteresis": 1}, [4]),
        "falls sixteenfold": ({"initial_power": power, "hysteresis": 1}, [4, 5, 6, 7]),
        "grows": ({"initial_power": power, "window": 4}, []),
    }
    cells = []
    for change, (moving, overflows) in changes.items():
        for implementation, ordering in (("muon_core", "ordered"), ("deepspeed", "deferred")):
            for label, scale in (("scale fixed", {"static": float(1 << power)}), (f"scale {change}", moving)):
                values = {"implementation": implementation, "step_ordering": ordering}
                spec = {
                    **base,
                    **values,
                    "name": f"{name} {label} overflows={len(overflows)} {implementation}",
                    "loss_scale": scale,
                    "faults": [{"kind": "inf", "step": step} for step in overflows],
                    # Three applied steps after the change.
                    "steps": 8 + max(0, len(overflows) - 1),
                }
                cells.append(Cell(values, spec))
    return Builtin(name, base, {}, cells)


def _dtype_assertion(name: str, _: Mapping[str, Any]) -> Builtin:
    base = {"task": {"name": "simple_model", "hidden_size": 128, "num_layers": 5}, "world_size": 1, "steps": 3,
            "loss_scale": {"initial_power": 8}}  # fmt: skip
    matrix: dict[str, list[Any]] = {"precision": ["fp16", "bf16", "fp32"], "optimizer.lr": [0.0, 0.05]}
    return Builtin(name, base, matrix, expand(base, matrix, name=name))


_TABLES: Final = (THIRTY_STEP, MIXED_OVERFLOW, GRADIENT_ACCUMULATION, SCALE_CHANGE, DTYPE_ASSERTION)


def _published_tables(_: str, __: Mapping[str, Any]) -> Builtin:
    """Every table's runs, each with a tag that says whose it is."""
    cells = [Cell(cell.values, {**cell.spec, "tags": [table]}) for table in _TABLES for cell in build(table, {}).cells]
    return Builtin(PUBLISHED_TABLES, {}, {}, cells)


def _cells(name: str, base: Mapping[str, Any], **matrix: list[Any]) -> list[Cell]:
    return expand(base, matrix, name=name)


_COMMON_OPTIONS: Final = ("gpus_per_rank", "deepspeed")
# What a run's name says of its ordering.
_ORDERING_WORDS: Final = re.compile(r" (?:(?:step_ordering|implementation)=\S+|muon_core$|deepspeed$)")
_BUILDERS: Final[dict[str, tuple[Callable[[str, Mapping[str, Any]], Builtin], tuple[str, ...]]]] = {
    THIRTY_STEP: (_thirty_step, ()),
    BYTE_GPT: (_byte_gpt, ("text",)),
    CALM_BOOM: (_calm_boom, ()),
    MIXED_OVERFLOW: (_mixed_overflow, ()),
    GRADIENT_ACCUMULATION: (_gradient_accumulation, ()),
    SCALE_CHANGE: (_scale_change, ()),
    DTYPE_ASSERTION: (_dtype_assertion, ()),
    PUBLISHED_TABLES: (_published_tables, ()),
}
BUILTIN_NAMES: Final = tuple(_BUILDERS)
# What tells the runs apart, for experiments that are no full matrix.
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    CALM_BOOM: ("implementation", "step_ordering"),
    MIXED_OVERFLOW: ("implementation", "zero_stage", "step_ordering"),
    GRADIENT_ACCUMULATION: ("implementation", "step_ordering", "gradient_accumulation_steps"),
    SCALE_CHANGE: ("implementation", "name"),
}
