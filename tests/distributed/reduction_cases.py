"""What each rank's backward passes give, and what DeepSpeed makes of them before the check."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.distributed.cases import WIDTHS, samples
from tests.distributed.scenario import DTYPES, Stack, ds_config, muon_engine


def reduced(
    *, stage: int, precision: str, gas: int = 1, loss_factor: float = 1.0, zero: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One window: every rank's own gradients, micro-batch by micro-batch, and the averaged one, whole.

    Gradients are loss-scaled, the scale is 1: what is averaged is what stands there.
    """
    torch.manual_seed(0)
    config = ds_config(stage=stage, precision=precision, gas=gas, fp16={"loss_scale": 1.0}, zero=zero)
    with muon_engine(Stack(WIDTHS), config, lr=0.05, iteration_dtype=torch.float32) as (engine, optimizer):
        own: list[list[Tensor]] = []
        for position in range(gas):
            x, y = samples(WIDTHS, 0, dist.get_rank(), position, 4)
            x, y = x.to(engine.device, DTYPES[precision]), y.to(engine.device)
            kept: dict[int, Tensor] = {}
            hooks = [
                parameter.register_hook(partial(_keep, kept, index))
                for index, parameter in enumerate(engine.module.parameters())
            ]
            engine.backward(functional.mse_loss(engine(x).float(), y) * loss_factor)
            for hook in hooks:
                hook.remove()
            own.append([kept[index].flatten().cpu() for index in sorted(kept)])
            if position < gas - 1:
                engine.step()
        averaged = _averaged(engine, optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {"own": everyone, "averaged": averaged}


def _keep(kept: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    kept[index] = gradient.detach().clone()


def _averaged(engine: Any, optimizer: Any) -> list[Tensor]:
    """The averaged gradient of every parameter, put together from all ranks."""
    partitions = optimizer.partitions
    pieces = []
    for partition in partitions.partitions:
        flat = partitions.reduced_gradient(partition).cpu()
        for parameter in partition.parameters:
            fragment = parameter.fragments[partitions.rank]
            pieces.append((parameter.index, fragment.start, flat.narrow(0, fragment.offset, fragment.numel)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(index, start, piece.clone()) for index, start, piece in pieces])
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for of_rank in everyone:
        for index, start, piece in of_rank:
            parts.setdefault(index, []).append((start, piece))
    return [
        torch.cat([piece for _, piece in sorted(parts[index], key=lambda part: part[0])]) for index in sorted(parts)
    ]
