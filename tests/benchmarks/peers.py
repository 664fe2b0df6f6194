"""Others' orthogonalization on a list of matrices, each as its own optimizer calls it.

Dion is measured where its package can be imported; it is no dependency.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

import muon_core
from muon_core.muon import orthogonalize_directions_
from muon_core.parameters import MatrixShape

Orthogonalize = Callable[[list[Tensor]], list[Tensor]]


def peers() -> dict[str, Orthogonalize]:
    found: dict[str, Orthogonalize] = {
        "muon_core": ours,
        "muon_core, kernels off": ours_without_kernels,
        "DeepSpeed 0.19.8": deepspeeds,
        "torch.optim.Muon": torchs,
    }
    if importlib.util.find_spec("dion") is not None:
        found["Dion"] = dions
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

    return [_zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7) for matrix in matrices]


def dions(matrices: list[Tensor]) -> list[Tensor]:
    """Its kernels on stacks of equal shape, as its optimizer batches them."""
    from dion.newton_schulz_triton import newton_schulz_triton

    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    return [result for group in by_shape.values() for result in newton_schulz_triton(torch.stack(group)).unbind()]


__all__ = ["muon_core", "ours", "peers"]
