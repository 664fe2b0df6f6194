"""Which matrices are iterated on together, and the tables that tell a pass where they lie.

Matrices that share their small dimension n go through one batch of n x n products, whatever their long dimension: on
the Gram matrix a 768 x 3072 and a 3072 x 768 matrix differ only at the start, the restart and the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal

import torch
from torch import Tensor

from muon_core.parameters import MatrixShape

Form = Literal["gram", "standard"]
# Elements of a batch: enough to fill a GPU many times over, so that the last, partly filled round costs little.
MAX_ELEMENTS: Final = 1 << 27
_ALIGNMENT: Final = 16


def iteration_form(rows: int, cols: int, ns_method: str) -> Form:
    """Say which form of the iteration is cheaper: products on the Gram matrix cost n^3, the others n^2 m."""
    short, long = sorted((rows, cols))
    return "gram" if ns_method == "gram" and 2 * long > 3 * short else "standard"


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbours in a batch with one shape: `count` matrices, the first of them entry number `first`."""

    rows: int
    cols: int
    first: int
    count: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def is_tall(self) -> bool:
        return self.rows > self.cols


@dataclass(frozen=True)
class Batch:
    """Matrices iterated on together.

    `pieces` and `inner_offsets` say for each entry which of the caller's pieces holds it, and at which element of that
    it begins: a stack of matrices is one piece and many entries.
    """

    form: Form
    segments: tuple[Segment, ...]
    pieces: tuple[int, ...]
    inner_offsets: tuple[int, ...]

    @property
    def small_dimension(self) -> int:
        return min(self.segments[0].rows, self.segments[0].cols)

    @property
    def num_entries(self) -> int:
        return len(self.pieces)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(segment.numel for segment in self.segments for _ in range(segment.count))

    @property
    def numel(self) -> int:
        return sum(self.sizes)


@lru_cache(maxsize=256)
def plan_batches(shapes: tuple[MatrixShape, ...], ns_method: str, max_elements: int) -> tuple[Batch, ...]:
    """Group pieces by form and small dimension into batches of about equal size, none above `max_elements`.

    A single larger matrix is a batch of its own.
    """
    groups: dict[tuple[Form, int], list[tuple[int, int, int, int]]] = {}
    for piece, shape in enumerate(shapes):
        form = iteration_form(shape.rows, shape.cols, ns_method)
        members = groups.setdefault((form, min(shape.rows, shape.cols)), [])
        members += [(shape.rows, shape.cols, piece, i * shape.rows * shape.cols) for i in range(shape.batch)]
    batches = []
    for (form, _), members in groups.items():
        members.sort()
        total = sum(rows * cols for rows, cols, _, _ in members)
        target = total / -(-total // max_elements)
        begin, elements = 0, 0
        for end, (rows, cols, _, _) in enumerate(members):
            if end > begin and elements + rows * cols > min(max_elements, target + rows * cols / 2):
                batches.append(_batch(form, members[begin:end]))
                begin, elements = end, 0
            elements += rows * cols
        batches.append(_batch(form, members[begin:]))
    return tuple(batches)


def _batch(form: Form, members: Sequence[tuple[int, int, int, int]]) -> Batch:
    segments: list[Segment] = []
    for entry, (rows, cols, _, _) in enumerate(members):
        if segments and (segments[-1].rows, segments[-1].cols) == (rows, cols):
            last = segments.pop()
            segments.append(Segment(rows, cols, last.first, last.count + 1))
        else:
            segments.append(Segment(rows, cols, entry, 1))
    return Batch(form, tuple(segments), tuple(m[2] for m in members), tuple(m[3] for m in members))


@dataclass(frozen=True, slots=True)
class BlockTables:
    """On the device: which block of which matrix a program of a pass works on. See `passes`."""

    num_blocks: int
    entry_of_block: Tensor
    first_block: Tensor
    """One more than there are entries: the last is the number of blocks."""
    numel: Tensor
    result_at: Tensor
    """Where each entry lies in the batch's own scratch, one after the other."""
    scale: Tensor
    """Each entry's aspect scale."""
    is_aligned: bool


@lru_cache(maxsize=256)
def block_tables(sizes: tuple[int, ...], scales: tuple[float, ...], block: int, device: torch.device) -> BlockTables:
    """Make the tables of a list of matrices once; later steps find them here."""
    numel = torch.tensor(sizes, dtype=torch.int64)
    blocks = (numel + block - 1) // block
    first = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.cumsum(0)])
    entries = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    return BlockTables(
        num_blocks=int(first[-1]),
        entry_of_block=entries.to(torch.int32).to(device),
        first_block=first.to(torch.int32).to(device),
        numel=numel.to(device),
        result_at=(numel.cumsum(0) - numel).to(device),
        scale=torch.tensor(scales, dtype=torch.float32).to(device),
        is_aligned=not any(size % _ALIGNMENT for size in sizes),
    )


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a list of matrices lies: element offsets, on the device, from one tensor that passes get as their pointer.

    The offsets may leave that tensor: all allocations of a device share one address space.
    """

    offsets: Tensor
    is_aligned: bool


@lru_cache(maxsize=256)
def _addresses(byte_offsets: tuple[int, ...], itemsize: int, is_aligned: bool, device: torch.device) -> Addresses:
    offsets = torch.tensor([offset // itemsize for offset in byte_offsets], dtype=torch.int64)
    return Addresses(offsets.to(device), is_aligned)


def addresses(tensors: Sequence[Tensor], batch: Batch) -> Addresses:
    """Look up, or make, where a batch's entries lie in the caller's pieces; `tensors[0]` is the base.

    Tensors that come back at the same places find their table made, so that a captured step needs no copy.
    """
    base, itemsize = tensors[0].data_ptr(), tensors[0].element_size()
    byte_offsets = tuple(
        tensors[piece].data_ptr() - base + inner * itemsize
        for piece, inner in zip(batch.pieces, batch.inner_offsets, strict=True)
    )
    step = _ALIGNMENT * itemsize
    is_aligned = base % 16 == 0 and not any(offset % step for offset in byte_offsets)
    return _addresses(byte_offsets, itemsize, is_aligned, tensors[0].device)
