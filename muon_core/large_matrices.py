"""Newton-Schulz in float32 on the CPU, for matrices so large that one product occupies the processor.

One matrix at a time, so that its result does not depend on which others there are; in buffers that every matrix of the
same shape uses again; and of products that are symmetric little more than one half, mirrored.

    out = alpha * A B + beta * C        A, B: n x k, k x n; the caller knows out to be symmetric
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from muon_core.kernels.batches import iteration_form

Coefficients = tuple[float, float, float]

# Below this small dimension batches are quicker: halves are then too small to compute at full speed.
SMALLEST_DIMENSION: Final = 512
# Up to this size a symmetric product is computed whole: halves of it would be too small.
LARGEST_WHOLE: Final = 128
# As for the other iterations: without it, four large singular values above noise of 1e-3 cost an error of 1e-2.
GRAM_RESTART_AFTER: Final = 3


def is_large(rows: int, cols: int) -> bool:
    return min(rows, cols) >= SMALLEST_DIMENSION


def orthogonalize_large_(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scales: Sequence[float],
    *,
    ns_method: str,
    schedule: Sequence[Coefficients],
) -> None:
    """Orthogonalize matrices of any shapes, each into its target, which may be the source itself."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for position, source in enumerate(sources):
        by_shape.setdefault((source.size(0), source.size(1)), []).append(position)
    for (rows, cols), positions in by_shape.items():
        iteration = LargeIteration(rows, cols)
        gram = iteration_form(rows, cols, ns_method) == "gram"
        for i in positions:
            iteration.run(sources[i], targets[i], schedule, gram=gram, scale=scales[i])


class LargeIteration:
    """Buffers for matrices of one shape, and the iteration in them."""

    def __init__(self, rows: int, cols: int) -> None:
        self._is_tall = rows > cols
        n = min(rows, cols)
        self._matrix, self._other = _buffer(rows, cols), _buffer(rows, cols)
        self._squares = [_buffer(n, n) for _ in range(4)]

    def run(
        self, source: Tensor, target: Tensor, schedule: Sequence[Coefficients], *, gram: bool, scale: float
    ) -> None:
        """Write the orthogonalized source, times `scale`, to the target, which may be the source.

        Args:
            source: (rows, cols), any float dtype.
            target: as large; any float dtype.
            schedule: the coefficients of each step.
            gram: iterate on the Gram matrix, which pays for long ones.
            scale: what the result is multiplied by.
        """
        self._normalize(source)
        iterate = self._on_the_gram_matrix if gram else self._on_the_matrix
        iterate(schedule)
        target.copy_(self._matrix if scale == 1.0 else self._matrix.mul_(scale))

    def _normalize(self, source: Tensor) -> None:
        """Scale to Frobenius norm 1 in two divisions that neither overflow nor underflow."""
        if source.dtype == torch.float64:
            largest = source.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
            source = source / largest
        matrix, tiny = self._matrix, torch.finfo(torch.float32).tiny
        matrix.copy_(source)
        flat = matrix.view(-1)
        matrix.div_(torch.linalg.vector_norm(flat, ord=float("inf")).clamp(min=tiny))
        matrix.div_(torch.linalg.vector_norm(flat).clamp(min=tiny))

    def _wide(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self._is_tall else matrix

    def _multiply(self, left: Tensor) -> None:
        """X <- left X."""
        torch.mm(left, self._wide(self._matrix), out=self._wide(self._other))
        self._matrix, self._other = self._other, self._matrix

    def _form_gram(self, out: Tensor) -> None:
        x = self._wide(self._matrix)
        symmetric_product_(x, x.mT, out)

    def _on_the_matrix(self, schedule: Sequence[Coefficients]) -> None:
        """X <- (a I + b R + c R^2) X with R = X X^T."""
        gram, polynomial, *_ = self._squares
        for coefficients in schedule:
            self._form_gram(gram)
            _polynomial_(gram, coefficients, polynomial)
            self._multiply(polynomial)

    def _on_the_gram_matrix(self, schedule: Sequence[Coefficients]) -> None:
        """Iterate on R = X X^T and keep the product Q of the polynomials P: X_k = Q X_0; R <- R P^2, Q <- Q P."""
        gram, polynomial, product, spare = self._squares
        for first in range(0, len(schedule), GRAM_RESTART_AFTER):
            steps = schedule[first : first + GRAM_RESTART_AFTER]
            self._form_gram(gram)
            for step, coefficients in enumerate(steps):
                _polynomial_(gram, coefficients, polynomial)
                if step + 1 < len(steps):
                    symmetric_product_(gram, polynomial, spare)
                    symmetric_product_(spare, polynomial, gram)
                if step == 0:
                    product, polynomial = polynomial, product
                else:
                    symmetric_product_(product, polynomial, spare)
                    product, spare = spare, product
            self._multiply(product)


def _buffer(rows: int, cols: int) -> Tensor:
    """What this module computes in, whatever default dtype or device the caller's script has set."""
    return torch.empty(rows, cols, dtype=torch.float32, device="cpu")


def _polynomial_(gram: Tensor, coefficients: Coefficients, out: Tensor) -> None:
    a, b, c = coefficients
    symmetric_product_(gram, gram, out, alpha=c, c=gram, beta=b)
    out.diagonal().add_(a)


def symmetric_product_(
    a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, c: Tensor | None = None, beta: float = 0.0
) -> None:
    """Write alpha A B + beta C, which the caller knows to be symmetric, into `out`.

    Halved again and again: of the four quarters the one below the diagonal is a product, the one above it is its mirror
    image, and the two on the diagonal are symmetric products themselves.

    Args:
        a: (n, k).
        b: (k, n).
        out: (n, n), none of the others.
        c: (n, n), symmetric.
    """
    n = out.size(0)
    if n <= LARGEST_WHOLE:
        _product_(a, b, out, alpha, c, beta)
        return
    half = (n + 1) // 2
    upper, lower = slice(0, half), slice(half, n)
    below = out[lower, upper]
    _product_(a[lower], b[:, upper], below, alpha, None if c is None else c[lower, upper], beta)
    out[upper, lower].copy_(below.mT)
    for part in (upper, lower):
        quarter = None if c is None else c[part, part]
        symmetric_product_(a[part], b[:, part], out[part, part], alpha=alpha, c=quarter, beta=beta)


def _product_(a: Tensor, b: Tensor, out: Tensor, alpha: float, c: Tensor | None, beta: float) -> None:
    if c is None:
        assert alpha == 1.0
        torch.mm(a, b, out=out)
    else:
        torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
