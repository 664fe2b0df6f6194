"""Squared norms of many tensors at once, for reading what a step left without slowing it down.

In float64: the squares of a finite float32 tensor leave float32's range at 1e19. On a GPU that has the kernels one
launch reads all tensors and one adds up, whatever their number; elsewhere torch's own fused norms do it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from muon_core.kernels import device_has_kernels

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, float64, on the first one's device, without a kernel of ours."""
    found = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    # DeepSpeed to 0.18.2 keeps Muon's momentum on the host, and AdamW's beside the weights.
    return torch.stack([norm.to(found[0].device) for norm in found])


class SquaredNorms:
    """Writes the squared norm of each of a fixed list of tensors to its place in a vector.

    Where the tensors lie is looked up once: make a new one when any of them has moved.

    Args:
        tensors: 1-D, contiguous, none empty; views of live storage.
        places: for each tensor its position in the vector, each given once.
        device: where the vector lies.
    """

    def __init__(self, tensors: Sequence[Tensor], places: Sequence[int], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        kinds = {(tensor.dtype, tensor.device) for tensor in self._tensors}
        self._has_kernels = (
            len(kinds) == 1
            and self._tensors[0].dtype in _KERNEL_DTYPES
            and self._tensors[0].device == device
            and device_has_kernels(device)
        )
        if self._has_kernels:
            from muon_core.kernels.sums import SquareSums

            self._sums = SquareSums(self._tensors, self._places)

    def write(self, out: Tensor) -> None:
        """Write the squared norms, as they are now, to their places in `out`; the rest of it is left alone.

        NaN where a tensor holds one, else infinite where it holds an infinity. Adds no host synchronization, unless
        tensors lie on another device than `out`.

        Args:
            out: 1-D, contiguous, float64, on the device given.
        """
        if not self._tensors:
            return
        if self._has_kernels:
            self._sums.write(out)
            return
        out.index_copy_(0, self._places, norms(self._tensors).square_().to(out.device))
