"""One small vector on its way: filled on the device, summed over the ranks, read on the host while training goes on."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Parcel:
    """A vector of float64 with its buffers on both sides; used again once it was read.

    On a GPU nothing here waits for the device but `read`: what the host tells is copied from pinned memory, and so is
    what it reads. Over several ranks the sum runs on a stream of its own, for training must not wait for it.
    """

    def __init__(self, head: int, tail: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Make the buffers.

        Args:
            head: how many values are written on the device, zero where nothing is written.
            tail: how many more, told by the host.
            device: where the vector is filled.
            group: whose ranks' vectors are added up; None with a single rank.
        """
        is_cuda = device.type == "cuda"
        self.vector = torch.zeros(head + tail, dtype=torch.float64, device=device)
        """What is to be sent: to be written between `fill` and `send`."""
        self._head, self._group = self.vector[:head], group
        self._tail = self.vector[head:]
        self._told = torch.zeros(tail, dtype=torch.float64, pin_memory=is_cuda)
        self._arrival = torch.zeros(head + tail, dtype=torch.float64, pin_memory=True) if is_cuda else self.vector
        self._arrived = torch.cuda.Event() if is_cuda else None
        self._work: Any = None

    def fill(self, tail: Sequence[float]) -> None:
        """Zero the head and write the tail."""
        self._told.copy_(torch.tensor(tail, dtype=torch.float64))
        self._tail.copy_(self._told, non_blocking=True)
        self._head.zero_()

    def send(self) -> None:
        """Start the sum, and the copy to the host. Collective over the group."""
        if self._arrived is None:
            if self._group is not None:
                self._work = dist.all_reduce(self.vector, group=self._group, async_op=True)
            return
        if self._group is None:
            self._arrival.copy_(self.vector, non_blocking=True)
            self._arrived.record()
            return
        # On a stream of its own: reading the result must not wait for the next step's kernels, nor they for the sum.
        stream = _side_stream(self.vector.device)
        stream.wait_stream(torch.cuda.current_stream(self.vector.device))
        with torch.cuda.stream(stream):
            dist.all_reduce(self.vector, group=self._group)
            self._arrival.copy_(self.vector, non_blocking=True)
            self._arrived.record(stream)

    def read(self) -> Tensor:
        """Wait for the sums, if they are not here yet; what is returned holds until the next `fill`.

        Raises:
            RuntimeError: a peer is gone.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._arrival


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
