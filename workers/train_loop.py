"""The training loop: one step's fixed order, readable top to bottom.

micro-batches: load → forward → (fault) → backward
step:          overflow check → unscale → clip → momentum → orthogonalize → apply     (`engine_step`)
probes:        measure this step, record the one before
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from muon_core.zero.precision import StepOutcome, engine_step
from muonscope.contract.telemetry import StepRecord
from workers.engine import Training
from workers.errors import NoProgress
from workers.probes import Measured, Probes
from workers.tasks import tokens_in


@dataclass(slots=True)
class Progress:
    """How far a rank is, read by polls from another thread; plain attributes, each written by the loop alone."""

    step: int | None = None
    """The step being attempted."""
    steps_done: int = 0
    part: int = 0
    """Parts of this step that are begun: loads and backward passes in turn, then the step itself."""
    discarded_in_a_row: int = 0
    """Up to now, those of the attempts before it included."""
    first_step_at: float | None = None
    last_step_at: float | None = None


@dataclass(slots=True)
class LoopHooks:
    """What the loop calls on the way."""

    record: Callable[[StepRecord], None]
    """Keep one step's record."""
    after_step: Callable[[int], None] = field(default=lambda steps: None)
    """Told how many steps of the run are attempted; every rank, after each step's record is on its way."""
    wants_records_now: Callable[[int], bool] = field(default=lambda steps: False)
    """Whether `after_step` needs all records kept before it runs (it writes a checkpoint)."""


def train(training: Training, first_step: int, progress: Progress, hooks: LoopHooks) -> None:
    """Attempt the run's steps from `first_step` on. Collective: every rank of the group runs it.

    Whatever ends it, the record of the last step that ran is kept first.

    Raises:
        LossScaleExhausted: an overflow at the smallest loss scale.
        NoProgress: `stop_after_discarded_steps` discarded steps in a row.
    """
    spec = training.spec
    probes = Probes(training.engine, training.parameters, training.muon_indices, training.probe_group)
    try:
        for step in range(first_step, spec.steps):
            measured = _one_step(training, step, progress)
            _keep(hooks, probes.measure(measured))
            progress.steps_done += 1
            progress.last_step_at = time.time()
            progress.first_step_at = progress.first_step_at or progress.last_step_at
            progress.discarded_in_a_row = progress.discarded_in_a_row + 1 if measured.outcome.discarded else 0
            if progress.discarded_in_a_row == spec.stop_after_discarded_steps:
                raise NoProgress(step, progress.discarded_in_a_row)
            if hooks.wants_records_now(step + 1):
                _keep(hooks, probes.flush())
            hooks.after_step(step + 1)
    finally:
        _keep(hooks, probes.flush())


def _one_step(training: Training, step: int, progress: Progress) -> Measured:
    engine, task, faults = training.engine, training.task, training.faults
    window = training.spec.gradient_accumulation_steps
    started = time.perf_counter()
    progress.step, progress.part = step, 0
    loss_sum: Tensor | None = None
    tokens: int | None = None
    outcome: StepOutcome | None = None
    for micro_batch in range(window):
        progress.part += 1
        batch = task.batch(step, micro_batch)
        tokens = _added(tokens, tokens_in(task, batch))
        on_device = tuple(tensor.to(engine.device, non_blocking=True) for tensor in batch)
        progress.part += 1
        loss = faults.in_loss(step, micro_batch, task.loss(engine, on_device))
        with faults.planted(step, micro_batch):
            engine.backward(loss)
        loss_sum = loss.detach().double() if loss_sum is None else loss_sum + loss.detach()
        progress.part += 1
        outcome = engine_step(engine)
    assert outcome is not None
    assert loss_sum is not None
    return Measured(
        step=step,
        outcome=outcome,
        loss=loss_sum / window,
        step_time_s=time.perf_counter() - started,
        tokens=tokens,
    )


def _keep(hooks: LoopHooks, record: StepRecord | None) -> None:
    if record is not None:
        hooks.record(record)


def _added(total: int | None, more: int | None) -> int | None:
    return total if more is None else more + (total or 0)
