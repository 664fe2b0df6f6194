"""The weights that this rank answers for: over all ranks every parameter's elements exactly once.

At stages 1 and 2 each rank holds every weight whole, so whole parameters are dealt out in turn; at stage 3 each rank
answers for its own partition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """A 1-D piece of one trainable parameter, in the model's dtype; a view, not a copy."""

    index: int
    start: int
    """The piece's first element within the parameter."""
    values: Tensor


def local_weights(parameters: Sequence[nn.Parameter], rank: int, world_size: int) -> list[LocalWeight]:
    """Return this rank's pieces of `parameters` (the trainable ones, by index)."""
    pieces = []
    for index, parameter in enumerate(parameters):
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            start = rank * partition.numel()
            numel = min(partition.numel(), parameter.ds_numel - start)  # type: ignore[attr-defined]
            if numel > 0:
                pieces.append(LocalWeight(index, start, partition.detach().view(-1).narrow(0, 0, numel)))
        elif index % world_size == rank and parameter.numel():
            pieces.append(LocalWeight(index, 0, parameter.detach().view(-1)))
    return pieces


def numel_of(parameter: Any) -> int:
    """Return a parameter's own size, also where ZeRO-3 has emptied it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
