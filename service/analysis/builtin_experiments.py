"""The built-in experiments: questions whose answers are known, to be run anywhere. Pure.

thirty-step   stage × initial loss scale × ordering: master dies at the high scale, all else trains
byte-gpt      a small GPT on real text, both orderings, at a high initial scale and at a calm one
calm-boom     one matrix overflows on step 1 and the other stays finite: what each leaves in its momentum
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from muonscope.contract.published import BYTE_GPT, THIRTY_STEP
from service.analysis.matrix import Cell, expand
from service.errors import InvalidInput

CALM_BOOM: Final = "calm-boom"
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
    return _with_resources(builder(name, options), options)


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


def _calm_boom(name: str, _: Mapping[str, Any]) -> Builtin:
    base = {
        "task": {"name": "calm_boom", "width": 32, "overflow_step": 1},
        "world_size": 1,
        "precision": "fp16",
        "loss_scale": {"initial_power": 4},
        "optimizer": {"lr": 0.01, "momentum": 0.9},
        "micro_batch_size": 1,
        "steps": 4,
    }
    # Each implementation offers orderings of its own.
    theirs = expand(
        base, {"implementation": ["deepspeed"], "step_ordering": ["master", "per_tensor", "deferred"]}, name=name
    )
    ours = expand(base, {"implementation": ["muon_core"], "step_ordering": ["master", "ordered"]}, name=name)
    return Builtin(name, base, {}, [*theirs, *ours])


_COMMON_OPTIONS: Final = ("gpus_per_rank",)
_BUILDERS: Final[dict[str, tuple[Callable[[str, Mapping[str, Any]], Builtin], tuple[str, ...]]]] = {
    THIRTY_STEP: (_thirty_step, ()),
    BYTE_GPT: (_byte_gpt, ("text",)),
    CALM_BOOM: (_calm_boom, ()),
}
BUILTIN_NAMES: Final = tuple(_BUILDERS)
