"""Newton-Schulz on the kernels: plan, one pass in, the iteration, one pass out; batch after batch, scratch reused.

Every method runs here. `standard` and `polar_express` take the standard form, `gram` the form on the Gram matrix where
that is cheaper, exactly as on torch's products; the two differ by rounding alone.

This module imports triton; `availability` says where it may be imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muon_core.kernels import passes
from muon_core.kernels.batches import MAX_ELEMENTS, Addresses, Batch, BlockTables, addresses, block_tables, plan_batches
from muon_core.kernels.guard import Guard
from muon_core.kernels.launch import launch
from muon_core.kernels.products import symmetric_product
from muon_core.parameters import MatrixShape

Coefficients = tuple[float, float, float]


@dataclass(frozen=True)
class Momentum:
    """Momentum buffers beside the gradients, moved in the pass that reads both."""

    buffers: Sequence[Tensor]
    momentum: float
    nesterov: bool


@dataclass(frozen=True)
class WeightUpdate:
    """Weights to apply the updates to; without it the updates take the directions' place."""

    weights: Sequence[Tensor]
    lr: float | Tensor
    weight_decay: float


def step_matrices_(
    sources: Sequence[Tensor],
    shapes: Sequence[MatrixShape],
    scales: Sequence[float],
    *,
    ns_method: str,
    schedule: Sequence[Coefficients],
    dtype: torch.dtype,
    max_elements: int = MAX_ELEMENTS,
    momentum: Momentum | None = None,
    update: WeightUpdate | None = None,
    guard: Guard = Guard(),  # noqa: B008
) -> None:
    """Orthogonalize matrices, with as much of Muon's step around it as the caller hands over.

    Args:
        sources: contiguous, one dtype and device; blended directions, or gradients where `momentum` is given. Without
            `update` the results are written into them.
        shapes: how each is viewed; each is one matrix or a stack of equal ones (`MatrixShape.blocks`).
        scales: what each result is multiplied by.
        ns_method, schedule, dtype: of the iteration.
        max_elements: of a batch: bounds the scratch, about 8 bytes an element.
    """
    step = _Step(sources, scales, momentum, update, guard)
    for batch in plan_batches(tuple(shapes), ns_method, max_elements):
        step.run(batch, schedule, dtype)


def find_nonfinite_(tensors: Sequence[Tensor], flag: Tensor) -> None:
    """Set the flag (float32, one element) to one if any element of any tensor is not finite; else leave it."""
    whole = Batch("standard", (), tuple(range(len(tensors))), (0,) * len(tensors))
    sizes = tuple(tensor.numel() for tensor in tensors)
    tables = block_tables(sizes, (1.0,) * len(sizes), passes.BLOCK, flag.device)
    where = addresses(tensors, whole)
    if tables.num_blocks:
        launch(
            passes.find_nonfinite,
            tables.num_blocks,
            (tensors[0], where.offsets, tables.entry_of_block, tables.first_block, tables.numel, flag),
            (tables.is_aligned and where.is_aligned, passes.BLOCK),
            num_warps=passes.NUM_WARPS,
        )


class _Step:
    """One call's tensors, and the passes over them."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        scales: Sequence[float],
        momentum: Momentum | None,
        update: WeightUpdate | None,
        guard: Guard,
    ) -> None:
        self.sources, self.scales = sources, scales
        self.momentum, self.update, self.guard = momentum, update, guard
        self.device = sources[0].device

    def run(self, batch: Batch, schedule: Sequence[Coefficients], dtype: torch.dtype) -> None:
        scales = tuple(self.scales[piece] for piece in batch.pieces)
        tables = block_tables(batch.sizes, scales, passes.BLOCK, self.device)
        scratch = torch.empty(batch.numel, dtype=dtype, device=self.device)
        self._read(batch, tables, scratch)
        result = iterate(scratch, batch, schedule)
        self._write(batch, tables, result)

    def _read(self, batch: Batch, tables: BlockTables, scratch: Tensor) -> None:
        """Momentum, Nesterov, norm and cast."""
        where, held = addresses(self.sources, batch), self.momentum
        buffers = self.sources if held is None else held.buffers
        of_buffers = where if held is None else addresses(buffers, batch)
        # A 0 or 1 as a script writes it, triton would take for a constant of the kernel.
        beta = 0.0 if held is None else float(held.momentum)
        largest = torch.empty(2, tables.num_blocks, dtype=torch.float32, device=self.device)
        factors = torch.empty(batch.num_entries, 2, dtype=torch.float32, device=self.device)
        constants = (
            beta < 0.5,
            held is not None and held.nesterov,
            self.guard.flag is not None,
            self.guard.gradient_scale is not None,
            tables.is_aligned and where.is_aligned and of_buffers.is_aligned,
            passes.BLOCK,
        )
        common = (self.sources[0], where.offsets, buffers[0], of_buffers.offsets, *self._blocks(tables))
        guard = (self.guard.flag, self.guard.gradient_scale, beta)
        launch(
            passes.measure,
            tables.num_blocks,
            (*common, largest[0], largest[1], *guard, 1.0 - beta),
            (held is not None, beta > 0.5, *constants),
            num_warps=passes.NUM_WARPS,
        )
        launch(
            passes.combine,
            batch.num_entries,
            (tables.first_block, largest[0], largest[1], factors),
            (1024,),
            num_warps=4,
        )
        launch(
            passes.normalize,
            tables.num_blocks,
            (*common, factors, scratch, tables.result_at, *guard),
            (held is not None, *constants),
            num_warps=passes.NUM_WARPS,
        )

    def _write(self, batch: Batch, tables: BlockTables, result: Tensor) -> None:
        """Aspect scale, and weight decay and learning rate where weights are given."""
        targets: Sequence[Tensor] = self.sources
        decay, lr = 1.0, 0.0
        rate: float | Tensor = 0.0
        if self.update is not None:
            targets, rate = self.update.weights, self.update.lr
            decay = float(self.update.weight_decay)
            if not isinstance(rate, Tensor):
                lr, decay = float(rate), 1.0 - rate * decay
        where: Addresses = addresses(targets, batch)
        launch(
            passes.write_back,
            tables.num_blocks,
            (
                result,
                tables.result_at,
                targets[0],
                where.offsets,
                tables.scale,
                *self._blocks(tables),
                self.guard.flag,
                decay,
                rate if isinstance(rate, Tensor) else lr,
            ),
            (
                self.update is not None,
                isinstance(rate, Tensor),
                self.guard.flag is not None,
                tables.is_aligned and where.is_aligned,
                passes.BLOCK,
            ),
            num_warps=passes.NUM_WARPS,
        )

    @staticmethod
    def _blocks(tables: BlockTables) -> tuple[Tensor, Tensor, Tensor]:
        return tables.entry_of_block, tables.first_block, tables.numel


def iterate(scratch: Tensor, batch: Batch, schedule: Sequence[Coefficients]) -> Tensor:
    """Iterate on a batch that lies normalized in `scratch`, entry after entry; return where the results lie likewise.

    That is `scratch` or a tensor as large.
    """
    work = _Iteration(scratch, batch)
    if batch.form == "gram":
        work.on_the_gram_matrix(schedule)
    else:
        work.on_the_matrix(schedule)
    return work.flat


class _Iteration:
    """A batch, its double, and four n x n tensors a matrix."""

    def __init__(self, scratch: Tensor, batch: Batch) -> None:
        self.flat, self.other = scratch, torch.empty_like(scratch)
        self.batch = batch
        n = batch.small_dimension
        self.squares = [scratch.new_empty(batch.num_entries, n, n) for _ in range(2 if batch.form == "standard" else 4)]

    def on_the_matrix(self, schedule: Sequence[Coefficients]) -> None:
        """X <- (a I + b R + c R^2) X with R = X X^T."""
        gram, polynomial = self.squares
        for a, b, c in schedule:
            self._form_gram(gram)
            symmetric_product(gram, gram, polynomial, alpha=c, c=gram, beta=b, gamma=a)
            self._multiply(polynomial)

    def on_the_gram_matrix(self, schedule: Sequence[Coefficients], restart_after: int = 3) -> None:
        """Iterate on R = X X^T and keep the product Q of the polynomials P: X_k = Q X_0; R <- R P^2, Q <- Q P."""
        gram, polynomial, product, spare = self.squares
        is_first = True
        self._form_gram(gram)
        for step, (a, b, c) in enumerate(schedule):
            if step == restart_after:
                self._multiply(product)
                self._form_gram(gram)
                is_first = True
            is_last = step + 1 in (restart_after, len(schedule))
            symmetric_product(gram, gram, polynomial, alpha=c, c=gram, beta=b, gamma=a)
            if not is_first:
                symmetric_product(product, polynomial, spare)
                product, spare = spare, product
            if not is_last:
                symmetric_product(gram, polynomial, spare)
                symmetric_product(spare, polynomial, gram)
            if is_first:
                product, polynomial = polynomial, product
                is_first = False
        self._multiply(product)

    def _form_gram(self, gram: Tensor) -> None:
        for first, last, matrices, is_tall in self._segments(self.flat):
            symmetric_product(matrices, matrices, gram[first:last], transposed=is_tall)

    def _multiply(self, left: Tensor) -> None:
        """X <- Q X, or X Q for the tall ones, whose Gram matrix is X^T X."""
        for (first, last, matrices, is_tall), (_, _, out, _) in zip(
            self._segments(self.flat), self._segments(self.other), strict=True
        ):
            if is_tall:
                torch.bmm(matrices, left[first:last], out=out)
            else:
                torch.bmm(left[first:last], matrices, out=out)
        self.flat, self.other = self.other, self.flat

    def _segments(self, flat: Tensor) -> list[tuple[int, int, Tensor, bool]]:
        views, cursor = [], 0
        for segment in self.batch.segments:
            elements = segment.count * segment.numel
            view = flat.narrow(0, cursor, elements).view(segment.count, segment.rows, segment.cols)
            views.append((segment.first, segment.first + segment.count, view, segment.is_tall))
            cursor += elements
        return views
