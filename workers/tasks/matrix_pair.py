"""Two bias-free square matrices under a squared error: the case of four micro-batches against one batch.

What a rank draws for a step does not depend on how the step is cut: micro-batch m takes the m-th part of the same
samples, which one generator a rank gives out step after step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonscope.contract.run_spec import MatrixPairTask
from workers.tasks import Batch, TaskContext


class MatrixPairRun:
    """Standard-normal inputs and targets; the published case at seed 0."""

    def __init__(self, task: MatrixPairTask, context: TaskContext) -> None:
        self.model = nn.Sequential(*[nn.Linear(task.width, task.width, bias=False) for _ in range(2)])
        self._width, self._context = task.width, context
        self._size = context.micro_batch_size * context.gradient_accumulation_steps
        self._next_step = 0
        self._generator = torch.Generator()
        self._samples: Batch = ()

    def batch(self, step: int, micro_batch: int) -> Batch:
        inputs, targets = self._step_samples(step)
        first = micro_batch * self._context.micro_batch_size
        part = slice(first, first + self._context.micro_batch_size)
        return inputs[part], targets[part]

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(model(inputs).float(), targets.float())

    def _step_samples(self, step: int) -> Batch:
        if step != self._next_step - 1:
            if step < self._next_step:
                self._next_step = 0
            while self._next_step <= step:
                self._draw()
        return self._samples

    def _draw(self) -> None:
        if self._next_step == 0:
            self._generator.manual_seed((self._context.seed * 0x9E3779B97F4A7C15 + self._context.rank + 1) % 2**63)
        dtype, shape = self._context.dtype, (self._size, self._width)
        self._samples = tuple(torch.randn(shape, generator=self._generator).to(dtype) for _ in range(2))
        self._next_step += 1


def build(task: MatrixPairTask, context: TaskContext) -> MatrixPairRun:
    return MatrixPairRun(task, context)
