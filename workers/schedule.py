"""A run's learning-rate schedule, with the face that DeepSpeed's engine asks of one.

The engine advances it after an applied step and leaves it where it is after a discarded one; where discarded steps are
to count, muon_core's optimizer advances it after those.
"""

import math
from typing import Any

from muonscope.contract.run_spec import LearningRateSchedule


def share_at(settings: LearningRateSchedule, step: int, steps: int) -> float:
    """Return the share of the full learning rate at a step, counted from 0, of a run of so many."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    last = steps - 1 - settings.warmup_steps
    progress = 1.0 if last <= 0 else min(1.0, (step - settings.warmup_steps) / last)
    if settings.decay == "constant":
        return 1.0
    fallen = progress if settings.decay == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1.0 - (1.0 - settings.final_share) * fallen


class Schedule:
    """Sets every group's `lr` to its share of what the group began with."""

    def __init__(self, optimizer: Any, settings: LearningRateSchedule, steps: int) -> None:
        self._optimizer, self._settings, self._steps = optimizer, settings, steps
        self._full = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0
        self._apply()

    def step(self, *_: Any, **__: Any) -> None:
        self._step += 1
        self._apply()

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        share = share_at(self._settings, self._step, self._steps)
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group["lr"] = full * share
