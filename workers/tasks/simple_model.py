"""The thirty-step table's task: biased square linears under a cross-entropy, by default on one fixed batch.

The mathematics of DeepSpeed's own unit-test model, restated: layer i is added to what layer i // 2 makes of the
running value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from muonscope.contract.run_spec import SimpleModelTask
from workers.tasks import Batch, TaskContext


class SimpleModel(nn.Module):
    """`num_layers` biased linears of one width; `forward(inputs, labels)` is the loss."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.cross_entropy = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = inputs
        for index, linear in enumerate(self.linears):
            hidden = self.linears[index // 2](hidden) + linear(hidden)
        loss: Tensor = self.cross_entropy(hidden, labels)
        return loss


class SimpleModelRun:
    """SimpleModel on standard-normal inputs and uniform labels."""

    def __init__(self, task: SimpleModelTask, context: TaskContext) -> None:
        self.model = SimpleModel(task.hidden_size, task.num_layers)
        self._task, self._context = task, context

    def batch(self, step: int, micro_batch: int) -> Batch:
        position = micro_batch if self._task.fixed_batch else step * 65536 + micro_batch
        generator = torch.Generator().manual_seed(batch_seed(self._context, position))
        size, width = self._context.micro_batch_size, self._task.hidden_size
        inputs = torch.randn(size, width, generator=generator)
        labels = torch.randint(0, width, (size,), generator=generator)
        return inputs.to(self._context.dtype), labels

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss


def batch_seed(context: TaskContext, position: int) -> int:
    """Return a generator seed of its own for each (seed, rank, position)."""
    mixed = (
        context.seed * 0x9E3779B97F4A7C15 + (context.rank + 1) * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB
    ) % 2**64
    # One round of splitmix64: neighbouring inputs give unrelated seeds.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed ^ (mixed >> 27)) % 2**63


def build(task: SimpleModelTask, context: TaskContext) -> SimpleModelRun:
    return SimpleModelRun(task, context)
