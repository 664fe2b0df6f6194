"""Sums of squares over lists of tensors, in two launches whatever their number.

This module imports triton; `availability` says where it may be imported.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from muon_core.kernels import passes
from muon_core.kernels.batches import Batch, addresses, block_tables
from muon_core.kernels.launch import launch


class SquareSums:
    """A fixed list of tensors of one dtype and device, and where the sum of each one's squares goes."""

    def __init__(self, tensors: Sequence[Tensor], places: Tensor) -> None:
        """Make the tables.

        Args:
            tensors: contiguous, none empty.
            places: int64, on their device.
        """
        sizes = tuple(tensor.numel() for tensor in tensors)
        self._first = tensors[0]
        self._count, self._places = len(sizes), places
        self._tables = block_tables(sizes, (1.0,) * len(sizes), passes.BLOCK, places.device)
        self._where = addresses(tensors, Batch("standard", (), tuple(range(len(sizes))), (0,) * len(sizes)))
        self._of_blocks = torch.empty(self._tables.num_blocks, dtype=torch.float64, device=places.device)

    def write(self, out: Tensor) -> None:
        """Write the sums to their places in `out`, float64; blocks are added up in one order, always the same."""
        tables = self._tables
        launch(
            passes.add_squares,
            tables.num_blocks,
            (
                self._first,
                self._where.offsets,
                tables.entry_of_block,
                tables.first_block,
                tables.numel,
                self._of_blocks,
            ),
            (tables.is_aligned and self._where.is_aligned, passes.BLOCK),
            num_warps=passes.NUM_WARPS,
        )
        launch(
            passes.add_blocks,
            self._count,
            (tables.first_block, self._of_blocks, self._places, out),
            (1024,),
            num_warps=4,
        )
