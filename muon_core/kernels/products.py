# mypy: disable-error-code="no-untyped-def"
"""Batched products whose result is symmetric: half of the tiles are computed, the other half is their mirror image.

    out = alpha * A B^T + beta * C + gamma * I        batched; A, B: (batch, N, K) or, `transposed`, (batch, K, N)

Every product of a Newton-Schulz iteration on the Gram matrix has this form, for all its factors are polynomials in one
symmetric matrix. A tile lies on or below the diagonal and is stored twice. Of a tile on the diagonal the lower triangle
is kept and mirrored: with two different operands rounding alone would make it asymmetric, and the iteration would carry
that on.

This module imports triton; `availability` says where it may be imported.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from muon_core.kernels.launch import launch
from muon_core.kernels.tuning import ProductConfig, product_config


@triton.jit
def _tile_of(index, HALVES: tl.constexpr):
    """Row and column of the index-th tile at or below the diagonal; a tile is one square high, HALVES squares wide."""
    if HALVES == 1:
        row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) / 2.0).to(tl.int32)
        # The root rounds: one step corrects it either way.
        row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
        row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
        col = index - row * (row + 1) // 2
    else:
        # Rows 2q and 2q + 1 hold q + 1 tiles each.
        pair = ((tl.sqrt(4.0 * index + 1.0) - 1.0) / 2.0).to(tl.int32)
        pair = tl.where(pair * (pair + 1) > index, pair - 1, pair)
        pair = tl.where((pair + 1) * (pair + 2) <= index, pair + 1, pair)
        rest = index - pair * (pair + 1)
        is_second = rest > pair
        row = 2 * pair + is_second.to(tl.int32)
        col = tl.where(is_second, rest - pair - 1, rest)
    return row, col


@triton.jit
def _store_square(
    acc, out, c, batch, row, col, alpha, beta, gamma, HAS_C: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr
):
    """Finish one square of the result and store it with its mirror image."""
    acc = acc * alpha
    if HAS_C:
        acc = acc + beta * c.load([batch, row, col]).reshape(TILE, TILE).to(tl.float32)
    if row == col:
        i = tl.arange(0, TILE)
        acc = acc + tl.where(i[:, None] == i[None, :], gamma, 0.0)
        square = acc.to(DTYPE)
        square = tl.where(i[:, None] >= i[None, :], square, tl.trans(square))
        out.store([batch, row, col], square.reshape(1, TILE, TILE))
    else:
        square = acc.to(DTYPE)
        out.store([batch, row, col], square.reshape(1, TILE, TILE))
        out.store([batch, col, row], tl.trans(square).reshape(1, TILE, TILE))


# One program a tile, without a loop over tiles: then the stores reuse the operands' shared memory, and two programs fit
# on a multiprocessor, one computing while the other stores. The number of tiles must not compile a kernel of its own.
@triton.jit(do_not_specialize=["k_size", "tiles_per_matrix"])
def _symmetric_product(
    out,
    a,
    b,
    c,
    alpha,
    beta,
    gamma,
    k_size,
    tiles_per_matrix,
    TRANSPOSED: tl.constexpr,
    HAS_C: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    HALVES: tl.constexpr,
    TILE_K: tl.constexpr,
):
    WIDTH: tl.constexpr = TILE * HALVES
    batch = tl.program_id(0) // tiles_per_matrix
    tile_row, tile_col = _tile_of(tl.program_id(0) % tiles_per_matrix, HALVES)
    row = tile_row * TILE
    col = tile_col * WIDTH
    acc = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for k in tl.range(0, tl.cdiv(k_size, TILE_K)):
        if TRANSPOSED:
            x = a.load([batch, k * TILE_K, row]).reshape(TILE_K, TILE)
            y = b.load([batch, k * TILE_K, col]).reshape(TILE_K, WIDTH)
            acc = tl.dot(tl.trans(x), y, acc)
        else:
            x = a.load([batch, row, k * TILE_K]).reshape(TILE, TILE_K)
            y = b.load([batch, col, k * TILE_K]).reshape(WIDTH, TILE_K)
            acc = tl.dot(x, tl.trans(y), acc)
    if HALVES == 1:
        _store_square(acc, out, c, batch, row, col, alpha, beta, gamma, HAS_C, DTYPE, TILE)
    else:
        left, right = tl.split(tl.permute(acc.reshape(TILE, 2, TILE), (0, 2, 1)))
        _store_square(left, out, c, batch, row, col, alpha, beta, gamma, HAS_C, DTYPE, TILE)
        # Of the tile on the diagonal the right half may lie above it: that is another tile's mirror image.
        if col + TILE <= row:
            _store_square(right, out, c, batch, row, col + TILE, alpha, beta, gamma, HAS_C, DTYPE, TILE)


_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def symmetric_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
    transposed: bool = False,
    config: ProductConfig | None = None,
) -> Tensor:
    """Write alpha A B^T + beta C + gamma I, which the caller knows to be symmetric, into `out`.

    Args:
        a, b: (batch, N, K) contiguous, or (batch, K, N) where `transposed`; float16 or bfloat16, rows of a multiple of
            16 bytes. They may be one tensor, but not `out`.
        out: (batch, N, N).
        c: (batch, N, N), symmetric; may be `a` or `b`, not `out`.
        config: None looks it up.
    """
    batch, n_size = out.shape[0], out.shape[-1]
    k_size = a.shape[1] if transposed else a.shape[2]
    if config is None:
        config = product_config(n_size, k_size, transposed=transposed, device=out.device)
    tile, tile_k, halves = config.tile, config.tile_k, config.halves

    def operand(x: Tensor, width: int) -> Any:
        block = [1, tile_k, width] if transposed else [1, width, tile_k]
        return TensorDescriptor(x, x.shape, x.stride(), block)

    def square(x: Tensor) -> Any:
        return TensorDescriptor(x, x.shape, x.stride(), [1, tile, tile])

    tiles = num_tiles(n_size, tile, halves)
    launch(
        _symmetric_product,
        tiles * batch,
        (
            square(out),
            operand(a, tile),
            operand(b, tile * halves),
            None if c is None else square(c),
            float(alpha),
            float(beta),
            float(gamma),
            k_size,
            tiles,
        ),
        (transposed, c is not None, _DTYPES[out.dtype], tile, halves, tile_k),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        variant=(),
    )
    return out


def num_tiles(n_size: int, tile: int, halves: int) -> int:
    """How many tiles of one square's height and `halves` squares' width reach the lower triangle of an n x n matrix."""
    rows = -(-n_size // tile)
    if halves == 1:
        return rows * (rows + 1) // 2
    return (rows // 2) * (rows // 2 + 1) + (rows % 2) * (rows // 2 + 1)
