"""Tasks that misbehave inside a rank, and models that surprise; the service of these tests allows them by name."""

import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from workers.tasks import TaskContext


class _Line:
    """A linear layer that learns to answer zero."""

    def __init__(self, context: TaskContext) -> None:
        self.model = nn.Linear(4, 4)
        self.context = context

    def batch(self, step: int, micro_batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(step)
        return (torch.randn(self.context.micro_batch_size, 4, generator=generator).to(self.context.dtype),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Any:
        return model(batch[0]).square().mean()


class _Hungry(_Line):
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Any:
        return super().loss(model, batch) + torch.empty(2**50).sum()


class _Stubborn(_Line):
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Any:
        if self.context.rank == 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            while True:
                time.sleep(3600)
        return super().loss(model, batch)


def hungry(context: TaskContext) -> _Line:
    """Want more memory than any machine has, in every attempt."""
    return _Hungry(context)


def stubborn(context: TaskContext) -> _Line:
    """Leave rank 0 alone in a collective: rank 1 never comes, and hears no signal but SIGKILL."""
    return _Stubborn(context)


def frozen(context: TaskContext) -> _Line:
    """Have nothing to train."""
    line = _Line(context)
    line.model.requires_grad_(False)
    return line


class _Named(nn.Module):
    """Parameters of given names and shapes, each of which has a share in the loss."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape)))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(each * scale.mean()).float().square().mean() for each in self.parameters()]).sum()


class _NamedTask:
    def __init__(self, context: TaskContext) -> None:
        self.model = _Named(context.options["shapes"])
        self._dtype = context.dtype

    def batch(self, step: int, micro_batch: int) -> tuple[Tensor, ...]:
        return (torch.ones(1, dtype=self._dtype),)

    def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Any:
        return model(batch[0])


def named(context: TaskContext) -> _NamedTask:
    """Train parameters of the names and shapes that the spec's options give."""
    return _NamedTask(context)
