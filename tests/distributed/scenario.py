"""What the distributed cases share: models, engines, and plain-data readings of what happened.

Everything a case returns is plain Python, so that ranks and runs compare by `==`: tensors become hex digests (equal
bits) or lists.
"""

import gc
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import Tensor, nn

import muon_core
from muon_core.zero.cpu import install_cpu_accelerator
from muon_core.zero.layout import attachment_of, momentum_views

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def set_up_rank() -> None:
    torch.set_num_threads(1)
    # DeepSpeed's stage 3 puts every parameter into messages that it does not print.
    torch.set_printoptions(threshold=0, edgeitems=0)
    logger.setLevel(logging.ERROR)
    is_cpu = install_cpu_accelerator()
    if not is_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend="gloo" if is_cpu else "nccl", verbose=False)
    # What the imports made stays for good; each engine's two collections need not walk through it.
    gc.collect()
    gc.freeze()


class Stack(nn.Module):
    """Linears of given widths with biases: neighbours differ in shape and straddle partitions."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class SimpleModel(nn.Module):
    """The 30-step table's model: the same mathematics as the one in DeepSpeed's own tests."""

    def __init__(self, hidden_size: int = 128, num_layers: int = 5) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)])
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for position, linear in enumerate(self.linears):
            x = self.linears[position // 2](x) + linear(x)
        return self.loss(x, y)


class CalmBoom(nn.Module):
    """Two matrices, of which one is fed what overflows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.calm = nn.Linear(width, width, bias=False)
        self.boom = nn.Linear(width, width, bias=False)

    def forward(self, calm_input: Tensor, boom_input: Tensor) -> Tensor:
        return self.calm(calm_input).sum() + self.boom(boom_input).sum()


class Zoo(nn.Module):
    """A parameter of every shape: convolution, expert stack, heads, fused parts, tied, frozen, empty, 1xN, odd."""

    def __init__(self, *, has_empty: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 12)
        self.conv = nn.Conv2d(1, 5, 3, padding=1)
        self.heads = nn.Linear(12, 9, bias=False)
        self.heads.weight.muon_num_heads = 3  # type: ignore[assignment]
        self.experts = nn.Parameter(torch.randn(3, 9, 7) / 3)
        self.fused = nn.Linear(7, 11, bias=False)
        self.fused.weight.muon_row_splits = (6, 3, 2)  # type: ignore[assignment]
        self.unfused = nn.Linear(11, 7, bias=False)
        if has_empty:
            self.empty = nn.Parameter(torch.empty(0, 12))
        self.tall = nn.Linear(7, 35)
        self.value = nn.Linear(35, 1)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.out = nn.Linear(35, 12, bias=False)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        image = self.conv(x.unsqueeze(1)).permute(0, 2, 3, 1) @ self.frozen
        x = torch.einsum("bth,ehd->btd", self.heads(x + image), self.experts)
        x = x + self.unfused(self.fused(x))
        x = torch.tanh(self.tall(x))
        # A factor, not a term: the loss would not feel what is added to every logit.
        return self.head(self.out(x)) * (1 + torch.sigmoid(self.value(x)))


def ds_config(
    *,
    stage: int,
    precision: str = "fp16",
    gas: int = 1,
    micro_batch: int = 4,
    clip: float = 0.0,
    fp16: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **extra,
    }
    if precision == "fp16":
        config["fp16"] = {"enabled": True, **(fp16 or {})}
    elif precision == "bf16":
        config["bf16"] = {"enabled": True, **config.pop("bf16", {})}
    return config


@contextmanager
def muon_engine(model: nn.Module, config: dict[str, Any], **settings: Any) -> Iterator[tuple[Any, muon_core.ZeroMuon]]:
    """An engine with our optimizer attached, taken down afterwards."""
    optimizer = muon_core.build_optimizer(model, **settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    try:
        muon_core.attach(engine, optimizer)
        yield engine, optimizer
    finally:
        take_down(engine)


def take_down(engine: Any) -> None:
    engine.destroy()
    gc.collect()
    # What an engine's first use imported stays for good, and so do cached readings: no later collection walks them.
    gc.freeze()


Piece = tuple[int, int, Tensor]


def full_weights(engine: Any) -> list[Tensor]:
    """The fp32 weights, whole, by parameter index; collective."""
    (weights,) = _put_together(engine, _weight_pieces(engine))
    return [weights[index] for index in sorted(weights)]


def full_momentum(engine: Any) -> dict[int, Tensor]:
    """Every trainable parameter's momentum, put together from all ranks' views; collective."""
    return _put_together(engine, _momentum_pieces(engine))[0]


def full_momentum_and_weights(engine: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Both at once, for they are read at every step."""
    momentum, weights = _put_together(engine, _momentum_pieces(engine), _weight_pieces(engine))
    return momentum, weights


def _weight_pieces(engine: Any) -> list[Piece]:
    """By our own layout: DeepSpeed's `safe_get_full_fp32_param` forgets that round-robin reorders parameters."""
    partitions = attachment_of(engine).partitions
    pieces = []
    for partition in partitions.partitions:
        flat = partitions.flat(partition).detach()
        for parameter in partition.parameters:
            fragment = parameter.fragments[partitions.rank]
            pieces.append((parameter.index, fragment.start, flat.narrow(0, fragment.offset, fragment.numel)))
    return pieces


def full_state(engine: Any, key: str) -> dict[int, Tensor]:
    """One kind of optimizer state, whole, by parameter index, for those that have it; collective."""
    optimizer, pieces = attachment_of(engine), []
    partitions = optimizer.partitions
    for partition in partitions.partitions:
        flat = optimizer.state[partitions.flat(partition)].get(key)
        for parameter in partition.parameters if flat is not None else ():
            fragment = parameter.fragments[partitions.rank]
            pieces.append((parameter.index, fragment.start, flat.narrow(0, fragment.offset, fragment.numel)))
    return _put_together(engine, pieces)[0]


def _momentum_pieces(engine: Any) -> list[Piece]:
    partitions = attachment_of(engine).partitions
    starts = {
        parameter.index: parameter.fragments[partitions.rank].start
        for partition in partitions.partitions
        for parameter in partition.parameters
    }
    return [(view.parameter_index, starts[view.parameter_index], view.view) for view in momentum_views(engine)]


def _put_together(engine: Any, *kinds: list[Piece]) -> list[dict[int, Tensor]]:
    """Join every rank's (index, first element, piece) into whole float32 parameters, kind by kind; collective.

    The bits are summed as integers, of which all but one are zero, so that -0.0 and NaN come through; float16 fits
    into float32 without rounding. Every element must come from somewhere, or none of its parameter.
    """
    partitions = attachment_of(engine).partitions.partitions
    numels = {parameter.index: parameter.numel for partition in partitions for parameter in partition.parameters}
    indices = sorted(numels)
    firsts = dict(zip(indices, itertools.accumulate([0, *(numels[index] for index in indices)]), strict=False))
    total = sum(numels.values())
    values = torch.zeros(len(kinds), total, dtype=torch.float32)
    counts = torch.zeros(len(kinds), len(indices), dtype=torch.int32)
    for position, kind in enumerate(kinds):
        for index, start, piece in kind:
            values[position].narrow(0, firsts[index] + start, piece.numel()).copy_(piece.detach())
            counts[position, indices.index(index)] += piece.numel()
    bits = torch.cat([values.view(torch.int32).flatten(), counts.flatten()]).to(engine.device)
    dist.all_reduce(bits)
    values = bits[: values.numel()].cpu().view(torch.float32).view(len(kinds), total)
    counts = bits[values.numel() :].cpu().view(len(kinds), len(indices))
    wholes: list[dict[int, Tensor]] = [{} for _ in kinds]
    for position, whole in enumerate(wholes):
        for place, index in enumerate(indices):
            assert counts[position, place] in (0, numels[index]), f"parameter {index} is held in part, or twice"
            if counts[position, place]:
                whole[index] = values[position].narrow(0, firsts[index], numels[index]).clone()
    return wholes


def digest(tensors: Any) -> str:
    """Equal digests: equal bits."""
    if isinstance(tensors, dict):
        tensors = [tensors[key] for key in sorted(tensors)]
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def local_momentum_digest(engine: Any) -> tuple[int, str]:
    """(number of buffers, digest) of what this rank holds: a check must say how much it compared."""
    views = momentum_views(engine)
    return len(views), digest([view.view for view in views])
