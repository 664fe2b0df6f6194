# mypy: disable-error-code="no-untyped-def"
"""Passes over lists of matrices: each reads and writes every element once, and one launch covers all matrices.

A program works on one block of one matrix. Where the matrices lie is a table of element offsets from one base tensor,
and which block belongs to which matrix another: `batches` makes both.

    find_nonfinite   one flag for all matrices: the overflow check
    measure          optional momentum and Nesterov blend; of each block the largest magnitude and the sum of squares
    combine          those of a matrix's blocks -> the two factors that take it to Frobenius norm 1
    normalize        direction -> iteration dtype, scaled by the two factors
    write_back       result -> direction, or weight decay and learning rate -> weight

For reading any list of tensors:

    add_squares      of each block the sum of squares, in float64
    add_blocks       those of a tensor's blocks -> its place in a vector

For ZeRO's flat partitions, where a shard is no whole matrix:

    blend            momentum and Nesterov blend, the direction in the gradient's place
    apply            weight decay and learning rate -> weight; of each block the update's sum of squares

With a flag that is not zero, nothing is written: a whole step can be discarded on the device, without asking the host.

This module imports triton; `availability` says where it may be imported.
"""

import triton
import triton.language as tl

BLOCK = 8192
NUM_WARPS = 8


@triton.jit
def _place(entry_of_block, first_block, numel, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's matrix, its elements' offsets within that, and which of them exist."""
    program = tl.program_id(0)
    entry = tl.load(entry_of_block + program)
    size = tl.load(numel + entry)
    if ALIGNED:
        # What the compiler cannot know of a loaded number; without it no load is 16 bytes wide.
        size = tl.multiple_of(size, 16)
    offsets = (program - tl.load(first_block + entry)) * BLOCK + tl.arange(0, BLOCK)
    return entry, offsets, offsets < size


@triton.jit
def _start(table, entry, ALIGNED: tl.constexpr):
    start = tl.load(table + entry)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def _lerp(start, end, weight, IS_SMALL: tl.constexpr):
    """torch's lerp, to the last bit: it goes from the nearer end."""
    if IS_SMALL:
        return tl.fma(weight + tl.zeros_like(start), end - start, start)
    else:
        return tl.fma(start - end, (1.0 - weight) + tl.zeros_like(start), end)


@triton.jit
def _exponent(magnitude):
    """Exponent of a float32, clamped so that two to it and its inverse are normal numbers."""
    bits = magnitude.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits >> 23) & 255) - 127, -126), 126)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def find_nonfinite(
    source, source_at, entry_of_block, first_block, numel, flag, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    entry, offsets, exists = _place(entry_of_block, first_block, numel, ALIGNED, BLOCK)
    value = tl.load(source + _start(source_at, entry, ALIGNED) + offsets, mask=exists, other=0.0).to(tl.float32)
    # Infinity and NaN alone differ from themselves by something else than zero.
    is_bad = ((value - value) != 0.0).to(tl.int32)
    if tl.max(is_bad) != 0:
        tl.store(flag, 1.0)


@triton.jit
def measure(
    source,
    source_at,
    momentum,
    momentum_at,
    entry_of_block,
    first_block,
    numel,
    largest,
    squares,
    flag,
    gradient_scale,
    beta,
    weight,
    MOVES: tl.constexpr,
    IS_WEIGHT_SMALL: tl.constexpr,
    IS_BETA_SMALL: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_FLAG:  # noqa: SIM102 -- a constant decides whether the flag may be loaded
        if tl.load(flag) != 0.0:
            return
    entry, offsets, exists = _place(entry_of_block, first_block, numel, ALIGNED, BLOCK)
    value = tl.load(source + _start(source_at, entry, ALIGNED) + offsets, mask=exists, other=0.0).to(tl.float32)
    if HAS_SCALE:
        value = value * tl.load(gradient_scale)
    if MOVES:
        pointers = momentum + _start(momentum_at, entry, ALIGNED) + offsets
        moved = _lerp(tl.load(pointers, mask=exists, other=0.0), value, weight, IS_WEIGHT_SMALL)
        tl.store(pointers, moved, mask=exists)
        if NESTEROV:
            value = _lerp(value, moved, beta, IS_BETA_SMALL)
        else:
            value = moved
    magnitude = tl.max(tl.abs(value))
    value = value * _power_of_two(-_exponent(magnitude))
    tl.store(largest + tl.program_id(0), magnitude)
    tl.store(squares + tl.program_id(0), tl.sum(value * value))


@triton.jit
def combine(first_block, largest, squares, factors, CHUNK: tl.constexpr):
    """Write two factors a matrix: a power of two, and the inverse norm of what that leaves; NaN if any element is not
    finite, zero if all are zero."""
    entry = tl.program_id(0)
    first = tl.load(first_block + entry)
    last = tl.load(first_block + entry + 1)
    magnitude = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in tl.range(first, last, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        magnitude = tl.maximum(magnitude, tl.load(largest + blocks, mask=blocks < last, other=0.0))
    exponent = _exponent(tl.max(magnitude))
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in tl.range(first, last, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        square = tl.load(squares + blocks, mask=blocks < last, other=0.0)
        # Too small a ratio counts as nothing beside the largest.
        ratio = tl.maximum(_exponent(tl.load(largest + blocks, mask=blocks < last, other=0.0)) - exponent, -63)
        total += square * _power_of_two(2 * ratio)
    squared = tl.sum(total)
    inverse = tl.where(squared > 0.0, 1.0 / tl.sqrt_rn(tl.where(squared > 0.0, squared, 1.0)), 0.0)
    # Not below infinity: infinite, or NaN, which a maximum may have passed over.
    inverse = tl.where(squared < float("inf"), inverse, float("nan"))
    tl.store(factors + 2 * entry, _power_of_two(-exponent))
    tl.store(factors + 2 * entry + 1, inverse)


@triton.jit
def normalize(
    source,
    source_at,
    momentum,
    momentum_at,
    entry_of_block,
    first_block,
    numel,
    factors,
    result,
    result_at,
    flag,
    gradient_scale,
    beta,
    MOVED: tl.constexpr,
    IS_BETA_SMALL: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_FLAG:  # noqa: SIM102 -- a constant decides whether the flag may be loaded
        if tl.load(flag) != 0.0:
            return
    entry, offsets, exists = _place(entry_of_block, first_block, numel, ALIGNED, BLOCK)
    if MOVED and not NESTEROV:
        value = tl.load(momentum + _start(momentum_at, entry, ALIGNED) + offsets, mask=exists, other=0.0)
    else:
        value = tl.load(source + _start(source_at, entry, ALIGNED) + offsets, mask=exists, other=0.0).to(tl.float32)
        if HAS_SCALE:
            value = value * tl.load(gradient_scale)
        if MOVED:
            moved = tl.load(momentum + _start(momentum_at, entry, ALIGNED) + offsets, mask=exists, other=0.0)
            value = _lerp(value, moved, beta, IS_BETA_SMALL)
    value = value * tl.load(factors + 2 * entry) * tl.load(factors + 2 * entry + 1)
    tl.store(result + _start(result_at, entry, ALIGNED) + offsets, value.to(result.dtype.element_ty), mask=exists)


@triton.jit
def write_back(
    result,
    result_at,
    target,
    target_at,
    scale,
    entry_of_block,
    first_block,
    numel,
    flag,
    decay,
    lr,
    APPLIES: tl.constexpr,
    HAS_LR_TENSOR: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With APPLIES the target is the weight, else it becomes the update.

    `decay` is the weight decay where lr is a tensor, else what is left of the weight after it.
    """
    if HAS_FLAG:  # noqa: SIM102 -- a constant decides whether the flag may be loaded
        if tl.load(flag) != 0.0:
            return
    entry, offsets, exists = _place(entry_of_block, first_block, numel, ALIGNED, BLOCK)
    update = tl.load(result + _start(result_at, entry, ALIGNED) + offsets, mask=exists, other=0.0).to(tl.float32)
    update = update * tl.load(scale + entry)
    pointers = target + _start(target_at, entry, ALIGNED) + offsets
    if APPLIES:
        if HAS_LR_TENSOR:
            rate = tl.load(lr).to(tl.float32)
            decay = 1.0 - rate * decay
        else:
            rate = lr
        kept = tl.load(pointers, mask=exists, other=0.0).to(tl.float32) * decay
        update = tl.fma(-rate + tl.zeros_like(update), update, kept)
    tl.store(pointers, update.to(target.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["size"])
def blend(
    gradient,
    momentum,
    size,
    beta,
    weight,
    IS_WEIGHT_SMALL: tl.constexpr,
    IS_BETA_SMALL: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = offsets < size
    value = tl.load(gradient + offsets, mask=exists, other=0.0)
    moved = _lerp(tl.load(momentum + offsets, mask=exists, other=0.0), value, weight, IS_WEIGHT_SMALL)
    tl.store(momentum + offsets, moved, mask=exists)
    if NESTEROV:
        moved = _lerp(value, moved, beta, IS_BETA_SMALL)
    tl.store(gradient + offsets, moved, mask=exists)


@triton.jit(do_not_specialize=["size"])
def apply(weight, update, squares, size, decay, lr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = offsets < size
    value = tl.load(update + offsets, mask=exists, other=0.0)
    kept = tl.load(weight + offsets, mask=exists, other=0.0) * decay
    # Rounded where torch's `mul_` and `add_` round.
    tl.store(weight + offsets, tl.fma(-lr + tl.zeros_like(value), value, kept), mask=exists)
    tl.store(squares + tl.program_id(0), tl.sum(value * value))


@triton.jit
def add_squares(
    source, source_at, entry_of_block, first_block, numel, of_blocks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    entry, offsets, exists = _place(entry_of_block, first_block, numel, ALIGNED, BLOCK)
    value = tl.load(source + _start(source_at, entry, ALIGNED) + offsets, mask=exists, other=0.0).to(tl.float64)
    tl.store(of_blocks + tl.program_id(0), tl.sum(value * value))


@triton.jit
def add_blocks(first_block, of_blocks, places, out, CHUNK: tl.constexpr):
    entry = tl.program_id(0)
    first = tl.load(first_block + entry)
    last = tl.load(first_block + entry + 1)
    total = tl.zeros((CHUNK,), dtype=tl.float64)
    for start in tl.range(first, last, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        total += tl.load(of_blocks + blocks, mask=blocks < last, other=0.0)
    tl.store(out + tl.load(places + entry), tl.sum(total))
