"""What the built-in experiments are known to show, run by run.

`thirty-step` has published figures: at an initial scale of 65536 a master-style step moves 0 of 10 parameters,
leaves the momentum non-finite and dies at step 17 with its loss scale at 1 after 17 overflows; everything else
moves 10 of 10 and trains. A weight that moved 1e-5 is not training, so the largest motion is held to a bound too.
`byte-gpt` has none: its runs are held against what the ordering and the initial scale lead one to expect.
"""

from dataclasses import dataclass
from typing import Final

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import Precision, StepOrdering, Verdict

THIRTY_STEP: Final = "thirty-step"
BYTE_GPT: Final = "byte-gpt"

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
    return "expected" if experiment == BYTE_GPT else "published"


def published_result(experiment: str | None, spec: RunSpec) -> Published | None:
    """Return what this run of the named built-in experiment is known to show, or None where nothing is known."""
    if experiment not in (THIRTY_STEP, BYTE_GPT):
        return None
    overflows = spec.precision is Precision.FP16 and spec.loss_scale.initial_power >= _OVERFLOWING_POWER
    dies = overflows and spec.step_ordering in _POISONED_BY_OVERFLOW
    if experiment == BYTE_GPT:
        return Published(Verdict.DIES if dies else Verdict.TRAINS)
    return _THIRTY_STEP_DIES if dies else _THIRTY_STEP_TRAINS
