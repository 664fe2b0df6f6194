"""Orthogonalize matrices by Newton-Schulz iteration.

The order inside `orthogonalize`, and why:

1. float32, divided by the largest magnitude: the squares of 1e30 or 1e-30 would leave float32, those of 1.0 do not.
2. divided by the Frobenius norm: every singular value is now at most 1, where the iteration converges.
3. cast to the iteration dtype: entries are in [-1, 1], so float16 holds them.
4. the iteration, on the orientation with fewer rows than columns.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from muon_core.kernels import device_has_kernels, shape_has_kernels
from muon_core.large_matrices import is_large, orthogonalize_large_
from muon_core.parameters import MatrixShape
from muon_core.processor import cpu_iteration_dtype

NS_METHODS: Final = ("standard", "gram", "polar_express")

ITERATION_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)

Coefficients = tuple[float, float, float]

# Keller Jordan's quintic: the largest slope at zero whose singular values end within about [0.68, 1.20].
QUINTIC: Final[Coefficients] = (3.4445, -4.7750, 2.0315)

# The Polar Express (Amsel et al., 2025, for singular values from 1e-3): each step is optimal for the interval that the
# step before it leaves. Steps past the end repeat the last, which converges to 1.
POLAR_EXPRESS: Final[tuple[Coefficients, ...]] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Rounding may push a singular value past 1, where the first polynomials explode: all but the last act on x / 1.01.
POLAR_EXPRESS_SAFETY: Final = 1.01

# After three iterations on the Gram matrix it is formed anew: as cheap as after two, at a third to half of the error.
GRAM_RESTART_AFTER: Final = 3


def coefficient_schedule(ns_method: str, ns_steps: int) -> list[Coefficients]:
    """Return the quintic's coefficients (a, b, c) for each step of a method.

    Raises:
        ValueError: an unknown method, or fewer steps than one.
    """
    if ns_method not in NS_METHODS:
        raise ValueError(f"ns_method={ns_method!r} is unknown; choose one of {', '.join(NS_METHODS)}")
    if not isinstance(ns_steps, int) or ns_steps < 1:
        raise ValueError(f"ns_steps={ns_steps} is not a number of iterations; give 1 or more")
    if ns_method != "polar_express":
        return [QUINTIC] * ns_steps
    last = len(POLAR_EXPRESS) - 1
    schedule = []
    for step in range(ns_steps):
        a, b, c = POLAR_EXPRESS[min(step, last)]
        safety = POLAR_EXPRESS_SAFETY if step < last else 1.0
        schedule.append((a / safety, b / safety**3, c / safety**5))
    return schedule


def default_iteration_dtype(device: torch.device) -> torch.dtype:
    """float16 where tensor cores make it the fastest exact choice; on a CPU what `processor` says."""
    return cpu_iteration_dtype() if device.type == "cpu" else torch.float16


def orthogonalize(
    matrix: Tensor,
    *,
    ns_method: str = "gram",
    ns_steps: int = 5,
    iteration_dtype: torch.dtype | None = None,
) -> Tensor:
    """Replace a matrix's singular values by values near one.

    A matrix of zeros stays zero; one non-finite entry makes its whole matrix NaN and leaves the batch's others alone.

    Args:
        matrix: (..., M, N), any float dtype; not modified.
        ns_method: `standard`, `gram` (the same polynomial through the Gram matrix, cheaper on rectangular ones) or
            `polar_express` (other coefficients, closer to one).
        ns_steps: iterations.
        iteration_dtype: float16, bfloat16 or float32; None chooses by device.
    Returns:
        A new tensor, same shape and dtype.
    """
    if not matrix.is_floating_point():
        raise ValueError(
            f"only real floating-point matrices can be orthogonalized, not {matrix.dtype}; convert it first"
        )
    if matrix.ndim < 2:
        raise ValueError(f"only matrices can be orthogonalized, not shape {tuple(matrix.shape)}")
    schedule = coefficient_schedule(ns_method, ns_steps)
    if matrix.numel() == 0:
        return matrix.clone()
    dtype = iteration_dtype or default_iteration_dtype(matrix.device)
    if takes_kernels(matrix, dtype) and shape_has_kernels(*matrix.shape[-2:]):
        return _orthogonalize_on_kernels(matrix, ns_method, schedule, dtype)
    batch_BMN = matrix.reshape(-1, *matrix.shape[-2:])
    if goes_one_by_one(matrix, dtype, *matrix.shape[-2:]):
        result_BMN = torch.empty_like(batch_BMN, memory_format=torch.contiguous_format)
        count = len(batch_BMN)
        orthogonalize_large_(list(batch_BMN), list(result_BMN), [1.0] * count, ns_method=ns_method, schedule=schedule)
        return result_BMN.reshape(matrix.shape)
    # One 3-D path for one matrix and for many: the products then round alike whatever the batch.
    x_BMN = _normalized(batch_BMN).to(dtype)
    is_tall = x_BMN.size(-2) > x_BMN.size(-1)
    x_Bnm = x_BMN.mT if is_tall else x_BMN
    # On the Gram matrix the iteration costs 14 n^3 + 4 n^2 m products, else 5 n^3 + 10 n^2 m.
    iterate = _gram if ns_method == "gram" and 2 * x_Bnm.size(-1) > 3 * x_Bnm.size(-2) else _standard
    x_Bnm = iterate(x_Bnm, schedule)
    return (x_Bnm.mT if is_tall else x_Bnm).to(matrix.dtype).reshape(matrix.shape)


def takes_kernels(matrix: Tensor, iteration_dtype: torch.dtype) -> bool:
    """Whether a tensor's device and dtypes are ones that `muon_core.kernels` takes."""
    has_dtypes = iteration_dtype in (torch.float16, torch.bfloat16) and matrix.dtype != torch.float64
    return has_dtypes and device_has_kernels(matrix.device)


def goes_one_by_one(matrix: Tensor, iteration_dtype: torch.dtype, rows: int, cols: int) -> bool:
    """Whether a matrix of this shape is one for `large_matrices`."""
    return matrix.device.type == "cpu" and iteration_dtype == torch.float32 and is_large(rows, cols)


def _orthogonalize_on_kernels(
    matrix: Tensor, ns_method: str, schedule: Sequence[Coefficients], dtype: torch.dtype
) -> Tensor:
    from muon_core.kernels.orthogonalize import step_matrices_

    result = matrix.clone(memory_format=torch.contiguous_format)
    rows, cols = matrix.shape[-2:]
    shape = MatrixShape(matrix.numel() // (rows * cols), rows, cols)
    step_matrices_([result], [shape], [1.0], ns_method=ns_method, schedule=schedule, dtype=dtype)
    return result


def _normalized(batch_BMN: Tensor) -> Tensor:
    """Scale every matrix to Frobenius norm 1, in float32, in two divisions that neither overflow nor underflow."""
    if batch_BMN.dtype == torch.float64:
        # What float32 cannot hold is brought into its range first.
        largest_B11 = batch_BMN.abs().amax(dim=(1, 2), keepdim=True)
        batch_BMN = batch_BMN / largest_B11.clamp(min=torch.finfo(torch.float64).tiny)
    flat_BL = batch_BMN.float().flatten(1)
    largest_B1 = flat_BL.abs().amax(dim=1, keepdim=True)
    # Float32's smallest normal: a zero matrix divides to zero, not to NaN.
    scaled_BL = flat_BL / largest_B1.clamp(min=torch.finfo(torch.float32).tiny)
    norm_B1 = torch.linalg.vector_norm(scaled_BL, dim=1, keepdim=True)
    return scaled_BL.div_(norm_B1.clamp(min=torch.finfo(torch.float32).tiny)).view_as(batch_BMN)


def _standard(x_Bnm: Tensor, schedule: Sequence[Coefficients]) -> Tensor:
    for a, b, c in schedule:
        gram_Bnn = torch.bmm(x_Bnm, x_Bnm.mT)
        polynomial_Bnn = torch.baddbmm(gram_Bnn, gram_Bnn, gram_Bnn, beta=b, alpha=c)
        x_Bnm = torch.baddbmm(x_Bnm, polynomial_Bnn, x_Bnm, beta=a)
    return x_Bnm


def _gram(x_Bnm: Tensor, schedule: Sequence[Coefficients]) -> Tensor:
    """Iterate on R = X X^T and keep the product Q of the polynomials: X_k = Q X_0."""
    gram_Bnn = torch.bmm(x_Bnm, x_Bnm.mT)
    product_Bnn: Tensor | None = None
    for step, (a, b, c) in enumerate(schedule):
        if step == GRAM_RESTART_AFTER and product_Bnn is not None:
            x_Bnm = torch.bmm(product_Bnn, x_Bnm)
            gram_Bnn = torch.bmm(x_Bnm, x_Bnm.mT)
            product_Bnn = None
        tail_Bnn = torch.baddbmm(gram_Bnn, gram_Bnn, gram_Bnn, beta=b, alpha=c)
        if product_Bnn is None:
            product_Bnn = tail_Bnn.clone()
            product_Bnn.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product_Bnn = torch.baddbmm(product_Bnn, tail_Bnn, product_Bnn, beta=a)
        if step + 1 not in (GRAM_RESTART_AFTER, len(schedule)):
            half_Bnn = torch.baddbmm(gram_Bnn, tail_Bnn, gram_Bnn, beta=a)
            gram_Bnn = torch.baddbmm(half_Bnn, tail_Bnn, half_Bnn, beta=a)
    assert product_Bnn is not None
    return torch.bmm(product_Bnn, x_Bnm)
