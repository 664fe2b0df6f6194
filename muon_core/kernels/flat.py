"""The elementwise parts of a step on ZeRO's flat partitions, each in one pass over the memory.

This module imports triton; `availability` says where it may be imported.
"""

import torch
from torch import Tensor

from muon_core.kernels import passes
from muon_core.kernels.launch import launch


def takes_flat(*tensors: Tensor) -> bool:
    """Whether these are tensors that the passes take: float32 and contiguous, none empty."""
    return all(t.dtype == torch.float32 and t.is_contiguous() and t.numel() > 0 for t in tensors)


def blend_momentum_(gradient: Tensor, momentum_buffer: Tensor, *, momentum: float, nesterov: bool) -> Tensor:
    """As `muon_core.muon.blend_momentum_`, to the last bit, in four passes over the memory instead of six."""
    launch(
        passes.blend,
        -(-gradient.numel() // passes.BLOCK),
        (gradient, momentum_buffer, gradient.numel(), float(momentum), 1.0 - momentum),
        (momentum > 0.5, momentum < 0.5, nesterov, passes.BLOCK),
        num_warps=passes.NUM_WARPS,
    )
    return gradient


def apply_update_(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> Tensor:
    """As `muon_core.muon.apply_update_`; return the update's squared norm, which the same pass adds up."""
    programs = -(-weight.numel() // passes.BLOCK)
    squares = torch.empty(programs, dtype=torch.float32, device=weight.device)
    launch(
        passes.apply,
        programs,
        (weight, update, squares, weight.numel(), 1.0 - lr * weight_decay, float(lr)),
        (passes.BLOCK,),
        num_warps=passes.NUM_WARPS,
    )
    return squares.sum()
