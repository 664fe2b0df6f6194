"""What the built-in experiments are known to show, run by run.

`thirty-step` has published figures: at an initial scale of 65536 a master-style step moves 0 of 10 parameters,
leaves the momentum non-finite and dies at step 17 with its loss scale at 1 after 17 overflows; everything else
moves 10 of 10 and trains. A weight that moved 1e-5 is not training, so the largest motion is held to a bound too.
`byte-gpt` has none: its runs are held against what the ordering and the initial scale lead one to expect.

The momentum norms of `calm-boom` and `mixed-overflow`, and the figures of `gradient-accumulation`, are those of
DeepSpeed 0.19.2 (Newton-Schulz once per micro-batch), of 0.19.8, and of 0.19.8 under six orderings, measured on torch
2.13.0, CPU.
"""

import math
from dataclasses import dataclass
from typing import Final

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import Implementation, Precision, StepOrdering, Verdict

THIRTY_STEP: Final = "thirty-step"
BYTE_GPT: Final = "byte-gpt"
CALM_BOOM: Final = "calm-boom"
MIXED_OVERFLOW: Final = "mixed-overflow"
GRADIENT_ACCUMULATION: Final = "gradient-accumulation"
SCALE_CHANGE: Final = "scale-change"
DTYPE_ASSERTION: Final = "dtype-assertion"
PUBLISHED_TABLES: Final = "published-tables"

# Orderings whose momentum moves before the overflow check: an overflow at the first step poisons it for ever.
_POISONED_BY_OVERFLOW: Final = frozenset({StepOrdering.MASTER})
# Gradients of the built-in tasks overflow fp16 at scales from this power of two upwards, and not far below it.
_OVERFLOWING_POWER: Final = 16


@dataclass(frozen=True, slots=True)
class Published:
    """What one run of a built-in experiment shows; None means that nothing is said about it."""

    verdict: Verdict
    verdict_step: int | None = None
    parameters_moved: int | None = None
    parameters_total: int | None = None
    momentum_finite: bool | None = None
    overflows: int | None = None
    final_loss_scale: float | None = None
    least_weight_motion: float = 0.0
    most_weight_motion: float | None = None


_THIRTY_STEP_DIES: Final = Published(
    Verdict.DIES,
    verdict_step=17,
    parameters_moved=0,
    parameters_total=10,
    momentum_finite=False,
    overflows=17,
    final_loss_scale=1.0,
    most_weight_motion=0.0,
)
_THIRTY_STEP_TRAINS: Final = Published(
    Verdict.TRAINS, parameters_moved=10, parameters_total=10, momentum_finite=True, least_weight_motion=0.1
)


def check_label(experiment: str | None) -> str:
    """Return what the named experiment's runs are held against: `published` figures, or what is `expected`."""
    return "expected" if experiment in (BYTE_GPT, SCALE_CHANGE) else "published"


def published_result(experiment: str | None, spec: RunSpec) -> Published | None:
    """Return what this run of the named built-in experiment is known to show, or None where nothing is known."""
    if experiment not in (THIRTY_STEP, BYTE_GPT):
        return None
    overflows = spec.precision is Precision.FP16 and spec.loss_scale.initial_power >= _OVERFLOWING_POWER
    dies = overflows and spec.step_ordering in _POISONED_BY_OVERFLOW
    if experiment == BYTE_GPT:
        return Published(Verdict.DIES if dies else Verdict.TRAINS)
    return _THIRTY_STEP_DIES if dies else _THIRTY_STEP_TRAINS


# The momentum norms of calm and boom after one, two and three steps that moved them. Ours is in unscaled float32,
# DeepSpeed's in loss-scaled float16.
_CALM_BOOM_NORMS: Final[dict[Implementation, dict[str, tuple[float, float, float]]]] = {
    Implementation.DEEPSPEED: {
        "calm": (55.15961456298828, 104.80107879638672, 149.48715209960938),
        "boom": (42.78044891357422, 81.2903060913086, 115.94530487060547),
    },
    Implementation.MUON_CORE: {
        "calm": (3.447650909423828, 6.550536155700684, 9.343133926391602),
        "boom": (2.673692226409912, 5.080016136169434, 7.2457051277160645),
    },
}
# What DeepSpeed's float16 makes of undoing the discarded step's move; our float32 comes within the tolerance.
_INVERTED_CALM: Final = 55.1564826965332
NORM_RTOL: Final = 1e-6
CALM_BOOM_STEPS: Final = 3


def calm_boom_norms(implementation: Implementation, ordering: StepOrdering) -> tuple[tuple[float, float], ...]:
    """Return the momentum norms (calm, boom) after steps 0, 1 and 2, of which step 1 overflows in boom alone."""
    calm, boom = (_CALM_BOOM_NORMS[implementation][name] for name in ("calm", "boom"))
    if ordering is StepOrdering.MASTER:
        return ((calm[0], boom[0]), (calm[1], math.inf), (calm[2], math.nan))
    if ordering is StepOrdering.PER_TENSOR:
        return ((calm[0], boom[0]), (calm[1], boom[0]), (calm[2], boom[1]))
    is_native = implementation is Implementation.DEEPSPEED
    undone = _INVERTED_CALM if is_native and ordering is StepOrdering.INVERTED else calm[0]
    return ((calm[0], boom[0]), (undone, boom[0]), (calm[1], boom[1]))


@dataclass(frozen=True, slots=True)
class AccumulationFigures:
    """Four micro-batches against one batch: Newton-Schulz calls of two steps, and how far the weights end apart."""

    ns_calls: int
    distance: float
    tolerance: float
    """Relative; 0 where `distance` is a bound and not a figure."""


def accumulation_figures(implementation: Implementation, ordering: StepOrdering) -> AccumulationFigures | None:
    """Return what is published of ZeRO-3 at four micro-batches a step, or None.

    1.337e-1 is 0.19.2's, whose Newton-Schulz differs from ours in its rounding: hence a hundredth.
    """
    if implementation is Implementation.DEEPSPEED:
        return AccumulationFigures(4, 4.180311516392976e-4, 1e-5) if ordering is StepOrdering.DEFERRED else None
    if ordering is StepOrdering.MASTER:
        return AccumulationFigures(16, 0.13369666039943695, 1e-2)
    return AccumulationFigures(4, 1e-6, 0.0) if ordering is StepOrdering.ORDERED else None


# DeepSpeed keeps its momentum in loss-scaled units. Reported of 0.19.8, of the weights' motion: 12.6 % after one
# halving, 33 % after a sixteenfold drop. How much depends on when the scale moves, so at least this much is expected.
LEAST_DISPLACEMENT: Final = 0.05
