"""The step in float64, slow and obvious: what every fast path is held against.

No batching, no in-place arithmetic, no shards, no loss scale. Read it to learn what the right step is.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from muon_core.newton_schulz import coefficient_schedule


@dataclass(frozen=True)
class MuonReference:
    """One matrix's weight and momentum before or after a step, float64."""

    weight: Tensor
    momentum_buffer: Tensor


def reference_orthogonalize(matrix: Tensor, *, ns_method: str = "standard", ns_steps: int = 5) -> Tensor:
    """Iterate X <- a X + b (X X^T) X + c (X X^T)^2 X in float64, from X / ||X||_F."""
    x = matrix.double()
    norm = torch.linalg.matrix_norm(x)
    if norm == 0:
        return torch.zeros_like(x)
    x = x / norm
    for a, b, c in coefficient_schedule(ns_method, ns_steps):
        gram = x @ x.mT
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x


def polar_factor(matrix: Tensor) -> Tensor:
    """Return U V^T of the singular value decomposition: the limit that an exact iteration approaches."""
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vh


def reference_muon_step(
    state: MuonReference,
    gradient: Tensor,
    *,
    lr: float,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    ns_method: str = "standard",
    ns_steps: int = 5,
) -> MuonReference:
    """Take one step on an unscaled, averaged gradient; a non-finite gradient changes nothing at all."""
    gradient = gradient.double()
    if not torch.isfinite(gradient).all():
        return state
    momentum_buffer = momentum * state.momentum_buffer + (1 - momentum) * gradient
    blend = momentum * momentum_buffer + (1 - momentum) * gradient if nesterov else momentum_buffer
    rows, cols = blend.shape
    update = reference_orthogonalize(blend, ns_method=ns_method, ns_steps=ns_steps) * math.sqrt(max(1.0, rows / cols))
    return MuonReference(state.weight * (1 - lr * weight_decay) - lr * update, momentum_buffer)


def reference_adamw_step(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and moments after AdamW's step number `step`, counted from 1."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient**2
    direction = (exp_avg / (1 - beta1**step)) / ((exp_avg_sq / (1 - beta2**step)).sqrt() + eps)
    return weight * (1 - lr * weight_decay) - lr * direction, exp_avg, exp_avg_sq
