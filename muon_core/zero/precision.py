"""Loss-scale bookkeeping, and the outcome of a step in our words; DeepSpeed's are translated here and nowhere else.

DeepSpeed moves the loss scale before it unscales and clips, so on the step where the scale grows the gradients arrive
halved, clipping compares a halved norm, and stage 3 reports one. `StepHooks` lets the growth wait until the step is
done: everything in a step then runs under the scale that its gradients carry.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from muon_core.errors import LossScaleExhausted
from muon_core.zero.layout import attachment_of

__all__ = [
    "LossScaleExhausted",
    "StepHooks",
    "StepListener",
    "StepOutcome",
    "engine_step",
    "is_exhaustion",
    "read_outcome",
    "step_outcome",
]

_EXHAUSTED = "Current loss scale already at minimum"


class StepListener(Protocol):
    """Told when a ZeRO step begins and how it ended."""

    def before_check(self) -> None:
        """Gradients are complete, reduced and still loss-scaled; the overflow check has not run."""

    def survived(self) -> None:
        """The step will be applied, and no gradient has been consumed; told only where the scale is held."""

    def after_step(self, overflow: bool) -> None:
        """The step was applied, or discarded because of an overflow."""


class StepHooks:
    """Wraps one ZeRO optimizer's `step`: tells a listener, and keeps the scale still while the step runs."""

    def __init__(self, zero: Any, listener: StepListener, *, hold_scale: bool) -> None:
        """Args: `hold_scale` lets growth wait for the end of the step; off, DeepSpeed's own order stays."""
        self._zero, self._listener = zero, listener
        self._growth_waits = False
        self._step, self._update_scale = zero.step, zero._update_scale
        zero.step = self._hooked_step
        if hold_scale:
            zero._update_scale = self._held_update_scale

    def _held_update_scale(self, has_overflow: bool = False) -> None:
        if has_overflow:
            self._update_scale(has_overflow)
        else:
            self._growth_waits = True
            self._listener.survived()

    def _hooked_step(self, closure: Any = None) -> None:
        self._growth_waits = False
        self._listener.before_check()
        self._step(closure)
        if self._growth_waits:
            self._growth_waits = False
            self._update_scale(False)
        self._listener.after_step(bool(self._zero.overflow))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one call of `engine_step` did."""

    is_boundary: bool
    """False inside a gradient accumulation window, where nothing was decided and the rest says nothing."""
    overflow: bool
    discarded: bool
    loss_scale_before: float
    loss_scale_after: float
    lr: float
    """Of the first parameter group, as this step used it."""
    ns_calls: int
    """Parameters orthogonalized on this rank since the boundary before: of the whole window, at its boundary."""
    grad_norm_on_device: Tensor | float | None
    """Global norm of the unscaled, unclipped gradient; infinite on a discarded step; None if not computed."""

    @property
    def grad_norm(self) -> float | None:
        """The norm as a float. Reading it waits for the device: do so where waiting is cheap."""
        return None if self.grad_norm_on_device is None else float(self.grad_norm_on_device)


_NS_CALLS_SEEN = "_muon_core_ns_calls_seen"


def engine_step(engine: Any) -> StepOutcome:
    """Run `engine.step()` and say what it did; call it once per micro-batch, as `engine.step()` itself.

    Adds no host synchronization.

    Raises:
        LossScaleExhausted: an overflow at the minimum loss scale.
        NotAttached: neither `attach` nor `deepspeed_native.install` has seen this engine.
    """
    attachment_of(engine)
    is_boundary = bool(engine.is_gradient_accumulation_boundary())
    loss_scale_before = float(engine.optimizer.loss_scale)
    lr = float(engine.optimizer.param_groups[0]["lr"])
    try:
        engine.step()
    except Exception as error:
        if is_exhaustion(error):
            raise LossScaleExhausted(loss_scale_before) from error
        raise
    return step_outcome(engine, is_boundary=is_boundary, loss_scale_before=loss_scale_before, lr=lr)


def is_exhaustion(error: Exception) -> bool:
    """Whether DeepSpeed, or `engine_step`, says so that a step overflowed at the minimum loss scale."""
    return isinstance(error, LossScaleExhausted) or _EXHAUSTED in str(error)


def step_outcome(engine: Any, *, is_boundary: bool, loss_scale_before: float, lr: float) -> StepOutcome:
    """Read the outcome of an `engine.step()` that has just run, once."""
    outcome = read_outcome(engine, is_boundary=is_boundary, loss_scale_before=loss_scale_before, lr=lr)
    if is_boundary:
        setattr(engine, _NS_CALLS_SEEN, attachment_of(engine).ns_calls)
    return outcome


def read_outcome(engine: Any, *, is_boundary: bool, loss_scale_before: float, lr: float) -> StepOutcome:
    """Read the same and leave no mark of it: for one who watches beside the loop's own reader."""
    zero, attachment = engine.optimizer, attachment_of(engine)
    overflow = bool(zero.overflow) if is_boundary else False
    seen = getattr(engine, _NS_CALLS_SEEN, 0)
    return StepOutcome(
        is_boundary=is_boundary,
        overflow=overflow,
        discarded=overflow,
        loss_scale_before=loss_scale_before,
        loss_scale_after=float(zero.loss_scale),
        lr=lr,
        ns_calls=attachment.ns_calls - seen,
        grad_norm_on_device=_grad_norm(engine, loss_scale_before) if is_boundary else None,
    )


def _grad_norm(engine: Any, loss_scale_before: float) -> Tensor | float | None:
    norm = engine.optimizer._global_grad_norm
    if norm is None or engine.optimizer.overflow:
        return norm
    if getattr(attachment_of(engine), "stage", None) == 3 and not holds_scale(engine.optimizer):
        # DeepSpeed's stage 3 divides by the scale after its growth.
        norm = norm * (float(engine.optimizer.loss_scale) / loss_scale_before)
    return norm


def holds_scale(zero: Any) -> bool:
    """Whether growth waits for the end of this ZeRO optimizer's steps."""
    return isinstance(getattr(zero._update_scale, "__self__", None), StepHooks)
