"""Others' orthogonalization on a list of matrices, each as its own optimizer calls it.

Peers that are no dependency are measured where their package can be imported, with the quintic's coefficients:

    Dion                  its triton kernels; the file `newton_schulz_triton.py` of its repository, as package `dion`
    quack                 gram-newton-schulz 0.1.6 on quack-kernels 0.5.0 and nvidia-cutlass-dsl 4.5.2, compiled
    optimuon              optimuon 0.1.1: batched gram form on torch's products
    triton-muon-adamw     triton-muon-adamw 1.0.0: symmetric triton products, one matrix at a time
    muonium               muonium 0.2.0: symmetric triton products, compiled
    muon-optimizer        muon-optimizer 0.1.0: Keller Jordan's own, eager
    muon-fsdp2            muon-fsdp2 0.3.0: the same, compiled
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import muon_core
from muon_core.muon import orthogonalize_directions_
from muon_core.newton_schulz import QUINTIC
from muon_core.parameters import MatrixShape

Orthogonalize = Callable[[list[Tensor]], list[Tensor]]
# These must run; the others are told apart by whether they do.
DEPENDENCIES = ("muon_core", "muon_core, kernels off", "torch.optim.Muon", "DeepSpeed 0.19.8")


def peers() -> dict[str, Orthogonalize]:
    found: dict[str, Orthogonalize] = {
        "muon_core": ours,
        "muon_core, kernels off": ours_without_kernels,
        "torch.optim.Muon": torchs,
    }
    if importlib.util.find_spec("deepspeed") is not None:
        found["DeepSpeed 0.19.8"] = deepspeeds
    found |= {name: run for name, (module, run) in _OPTIONAL.items() if importlib.util.find_spec(module) is not None}
    return found


def ours(matrices: list[Tensor]) -> list[Tensor]:
    """In place: the results take the directions' place, as they do in every step of ours."""
    shapes = [MatrixShape(1, *matrix.shape) for matrix in matrices]
    orthogonalize_directions_(matrices, shapes, ns_method="gram", ns_steps=5)
    return matrices


def ours_without_kernels(matrices: list[Tensor]) -> list[Tensor]:
    from muon_core.kernels import kernels

    with kernels("off"):
        return ours(matrices)


def deepspeeds(matrices: list[Tensor]) -> list[Tensor]:
    """Its default: the compiled gram form, one matrix at a time."""
    from deepspeed.runtime.zero.muon.original_muon import zeropower_via_gram_newtonschulz

    return [zeropower_via_gram_newtonschulz(matrix, steps=5) for matrix in matrices]


def torchs(matrices: list[Tensor]) -> list[Tensor]:
    from torch.optim._muon import _zeropower_via_newtonschulz

    return [_zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7) for matrix in matrices]


def _by_shape(matrices: list[Tensor], run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run on stacks of equal shape; the results are in the stacks' order."""
    stacks: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        stacks.setdefault(matrix.shape, []).append(matrix)
    return [result for stack in stacks.values() for result in run(torch.stack(stack)).unbind()]


def dions(matrices: list[Tensor]) -> list[Tensor]:
    """Its kernels on stacks of equal shape, as its optimizer batches them."""
    from dion.newton_schulz_triton import newton_schulz_triton

    return _by_shape(matrices, newton_schulz_triton)


@cache
def _quack() -> Any:
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(ns_coefficients=[list(QUINTIC)] * 5)


def quacks(matrices: list[Tensor]) -> list[Tensor]:
    """Its kernels and its compilation on stacks of equal shape, as its optimizer batches them."""
    return _by_shape(matrices, _quack())


def optimuons(matrices: list[Tensor]) -> list[Tensor]:
    from optimuon._newton_schulz import gram_newton_schulz_batched

    results: list[Tensor] = gram_newton_schulz_batched(matrices, ns_coefficients=QUINTIC, ns_norm_scale=1.0)
    return results


def triton_muon_adamws(matrices: list[Tensor]) -> list[Tensor]:
    from triton_muon_adamw.muon.triton_muon import newton_shultz_step

    results = []
    for matrix in matrices:
        x = matrix.bfloat16()
        is_tall = x.size(0) > x.size(1)
        x = x.T.contiguous() if is_tall else x
        x = x / x.norm().clamp(min=1e-7)
        step, spare = torch.empty_like(x), torch.empty_like(x)
        newton_shultz_step(x, *QUINTIC, step)
        for _ in range(4):
            newton_shultz_step(step, *QUINTIC, spare)
            step, spare = spare, step
        results.append(step.T if is_tall else step)
    return results


def muoniums(matrices: list[Tensor]) -> list[Tensor]:
    from muonium.orthogonalize.newton_schulz import ns_loop_triton

    return _by_shape(matrices, lambda stack: ns_loop_triton(stack.bfloat16()))


def muon_optimizers(matrices: list[Tensor]) -> list[Tensor]:
    from muon import zeropower_via_newtonschulz5

    return [zeropower_via_newtonschulz5(matrix, steps=5) for matrix in matrices]


def muon_fsdp2s(matrices: list[Tensor]) -> list[Tensor]:
    from muon_fsdp2 import zeropower_via_newtonschulz5

    return [zeropower_via_newtonschulz5(matrix, steps=5) for matrix in matrices]


_OPTIONAL: dict[str, tuple[str, Orthogonalize]] = {
    "Dion": ("dion", dions),
    "quack": ("gram_newton_schulz", quacks),
    "optimuon": ("optimuon", optimuons),
    "triton-muon-adamw": ("triton_muon_adamw", triton_muon_adamws),
    "muonium": ("muonium", muoniums),
    "muon-optimizer": ("muon", muon_optimizers),
    "muon-fsdp2": ("muon_fsdp2", muon_fsdp2s),
}

__all__ = ["muon_core", "ours", "peers"]
