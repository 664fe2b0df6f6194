"""Clipping as DeepSpeed's own Muon does it: by hand in plain torch, in DeepSpeed itself, and in ours."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import muon_core
from muon_core.muon import adamw_step_, apply_update_, blend_momentum_
from muon_core.zero.layout import attachment_of
from muon_core.zero.precision import engine_step
from tests.distributed.cases import WIDTHS, build_engine, samples
from tests.distributed.scenario import Stack, ds_config, full_weights, take_down

LR, MOMENTUM, BETAS, EPS = 0.05, 0.95, (0.9, 0.999), 1e-8


def update_clipped_by_hand(*, world_size: int, steps: int, micro_batch: int, clip: float) -> list[list[float]]:
    """Muon's updates and AdamW's gradients under one norm, written out for one process and the full batch."""
    torch.manual_seed(0)
    model = Stack(WIDTHS)
    group = {"lr": 1e-3, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    buffers = {p: torch.zeros_like(p) for p in model.parameters()}
    states: dict[Tensor, dict[str, Any]] = {p: {} for p in model.parameters()}
    for step in range(steps):
        batches = [samples(WIDTHS, step, rank, 0, micro_batch) for rank in range(world_size)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            moves: dict[Tensor, Tensor] = {}
            for p in model.parameters():
                assert p.grad is not None
                moves[p] = p.grad
                if p.ndim == 2:
                    blend = blend_momentum_(p.grad, buffers[p], momentum=MOMENTUM, nesterov=True)
                    moves[p] = muon_core.orthogonalize(blend) * max(1.0, p.size(0) / p.size(1)) ** 0.5
            norm = torch.stack([move.square().sum() for move in moves.values()]).sum().sqrt()
            factor = clip / max(norm.item(), clip)
            for p, move in moves.items():
                if p.ndim == 2:
                    apply_update_(p, move * factor, lr=LR, weight_decay=0.0)
                else:
                    adamw_step_(p, move * factor, states[p], group)
        model.zero_grad()
    return [p.detach().tolist() for p in model.parameters()]


def clipped(*, stage: int, implementation: str, clip_scope: str, clip: float, steps: int = 3) -> dict[str, Any]:
    """What DeepSpeed's Muon, or ours, measures and does with clipping on; fp32, gradients of full rank."""
    torch.manual_seed(0)
    config = ds_config(stage=stage, precision="fp32", micro_batch=64, clip=clip)
    ordering = "deferred" if implementation == "deepspeed" else "ordered"
    engine = build_engine(
        Stack(WIDTHS), config, implementation, ordering, lr=LR, momentum=MOMENTUM, clip_scope=clip_scope
    )
    norms = []
    for step in range(steps):
        x, y = samples(WIDTHS, step, torch.distributed.get_rank(), 0, 64)
        engine.backward(functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device)))
        outcome = engine_step(engine)
        if implementation == "deepspeed":
            norms.append(outcome.grad_norm)
        else:
            measured = attachment_of(engine).clipping.last_norm
            norms.append(None if measured is None else measured.item())
    weights = [weight.tolist() for weight in full_weights(engine)]
    take_down(engine)
    return {"norms": norms, "weights": weights}
