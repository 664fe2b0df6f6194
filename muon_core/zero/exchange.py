"""Shards of matrices to their owners, and whole updates back as shards.

A matrix that lies whole on a rank never travels. The others do, in chunks: a chunk is one all-to-all there and one
back, and holds at most `bucket_elements` elements (or a single larger parameter), so scratch is bounded and shared.
Momentum never travels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muon_core.zero.layout import Fragment, PlacedParameter

DEFAULT_BUCKET_ELEMENTS: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class Traveller:
    """A parameter whose shards lie on several ranks, and the rank that will hold it whole."""

    position: int
    """In its partition's `parameters`."""
    owner: int


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Who orthogonalizes what of one partition; the same on every rank."""

    whole: tuple[tuple[int, ...], ...]
    """By rank: positions of the parameters that lie whole on it."""
    chunks: tuple[tuple[Traveller, ...], ...]


def plan_exchange(parameters: Sequence[PlacedParameter], world_size: int, bucket_elements: int) -> ExchangePlan:
    """Decide owners so that the ranks' costs are even, and chunks so that scratch is bounded.

    Dearest first, each to the least loaded rank; equal shapes stay adjacent, so an owner can batch them.
    """
    whole: list[list[int]] = [[] for _ in range(world_size)]
    load = [0.0] * world_size
    travelling = []
    for position, parameter in enumerate(parameters):
        holders = [rank for rank, fragment in enumerate(parameter.fragments) if fragment.numel]
        if len(holders) == 1:
            whole[holders[0]].append(position)
            load[holders[0]] += orthogonalization_cost(parameter)
        elif holders:
            travelling.append(position)
    travelling.sort(key=lambda position: (-orthogonalization_cost(parameters[position]), position))
    chunks: list[list[Traveller]] = []
    elements = 0
    for position in travelling:
        parameter = parameters[position]
        # Among equally loaded ranks the one that already holds most sends least.
        owner = min(range(world_size), key=lambda rank: (load[rank], -parameter.fragments[rank].numel, rank))
        load[owner] += orthogonalization_cost(parameter)
        if not chunks or elements + parameter.numel > bucket_elements:
            chunks.append([])
            elements = 0
        chunks[-1].append(Traveller(position, owner))
        elements += parameter.numel
    return ExchangePlan(tuple(map(tuple, whole)), tuple(map(tuple, chunks)))


def orthogonalization_cost(parameter: PlacedParameter) -> float:
    """Multiply-adds of one Newton-Schulz step, up to a factor."""
    assert parameter.matrices is not None
    cost = 0
    for block in parameter.matrices.blocks:
        short, long = sorted((block.rows, block.cols))
        cost += block.batch * short * short * (2 * long + short)
    return float(cost)


class Exchange:
    """Carries out plans over one process group.

    Args:
        wire_dtype: float32 changes no bit. float16 and bfloat16 halve the traffic and round what travels, and only
            that; float16 takes each shard to its own power of two first, so a gradient of 1e-12 arrives.
    """

    def __init__(self, process_group: dist.ProcessGroup, wire_dtype: torch.dtype = torch.float32) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.wire_dtype = wire_dtype
        # A float16 shard is led by one element: the exponent of its power of two.
        self._header = int(wire_dtype == torch.float16)
        self._scratch: dict[str, Tensor] = {}
        self.num_collectives = 0
        self.elements_sent = 0
        """Elements that left this rank."""

    def to_owners(
        self, chunk: Sequence[Traveller], parameters: Sequence[PlacedParameter], shard: Tensor
    ) -> dict[int, Tensor]:
        """Collect, as new 1-D float32 tensors by position, the chunk's parameters that this rank owns.

        Collective: every rank of the group, the same chunk.
        """
        outgoing = [
            [self._piece(parameters[t.position], self.rank) for t in chunk if t.owner == rank]
            for rank in range(self.world_size)
        ]
        owned = [t.position for t in chunk if t.owner == self.rank]
        incoming = [[self._piece(parameters[p], rank) for p in owned] for rank in range(self.world_size)]
        send = self._buffer("send", self._elements(outgoing), shard.device)
        cursor = 0
        for row in outgoing:
            for fragment in row:
                cursor = self._pack(send, cursor, shard.narrow(0, fragment.offset, fragment.numel))
        received = self._all_to_all(send, outgoing, incoming)
        whole = {p: torch.empty(parameters[p].numel, dtype=torch.float32, device=shard.device) for p in owned}
        cursor = 0
        for row in incoming:
            for position, fragment in zip(owned, row, strict=True):
                target = whole[position].narrow(0, fragment.start, fragment.numel)
                cursor = self._unpack(received, cursor, target)
        return whole

    def from_owners(
        self,
        chunk: Sequence[Traveller],
        parameters: Sequence[PlacedParameter],
        whole: dict[int, Tensor],
        shard: Tensor,
    ) -> None:
        """Write the owners' results back into every rank's shard; collective like `to_owners`."""
        owned = [t.position for t in chunk if t.owner == self.rank]
        outgoing = [[self._piece(parameters[p], rank) for p in owned] for rank in range(self.world_size)]
        incoming = [
            [self._piece(parameters[t.position], self.rank) for t in chunk if t.owner == rank]
            for rank in range(self.world_size)
        ]
        send = self._buffer("send", self._elements(outgoing), shard.device)
        cursor = 0
        for row in outgoing:
            for position, fragment in zip(owned, row, strict=True):
                cursor = self._pack(send, cursor, whole[position].narrow(0, fragment.start, fragment.numel))
        received = self._all_to_all(send, outgoing, incoming)
        cursor = 0
        for row in incoming:
            for fragment in row:
                cursor = self._unpack(received, cursor, shard.narrow(0, fragment.offset, fragment.numel))

    @staticmethod
    def _piece(parameter: PlacedParameter, rank: int) -> Fragment:
        return parameter.fragments[rank]

    def _wire_elements(self, row: Sequence[Fragment]) -> int:
        return sum(fragment.numel + self._header for fragment in row if fragment.numel)

    def _elements(self, rows: Sequence[Sequence[Fragment]]) -> int:
        return sum(self._wire_elements(row) for row in rows)

    def _all_to_all(
        self, send: Tensor, outgoing: Sequence[Sequence[Fragment]], incoming: Sequence[Sequence[Fragment]]
    ) -> Tensor:
        received = self._buffer("receive", self._elements(incoming), send.device)
        sizes_out = [self._wire_elements(row) for row in outgoing]
        sizes_in = [self._wire_elements(row) for row in incoming]
        dist.all_to_all_single(received, send, sizes_in, sizes_out, group=self.process_group)
        self.num_collectives += 1
        self.elements_sent += sum(sizes_out) - sizes_out[self.rank]
        return received

    def _buffer(self, name: str, elements: int, device: torch.device) -> Tensor:
        """Return the first `elements` of a scratch buffer that grows to the largest chunk and is then reused."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < elements or buffer.device != device:
            buffer = torch.empty(elements, dtype=self.wire_dtype, device=device)
            self._scratch[name] = buffer
        return buffer.narrow(0, 0, elements)

    def _pack(self, buffer: Tensor, cursor: int, piece: Tensor) -> int:
        if not piece.numel():
            return cursor
        body = buffer.narrow(0, cursor + self._header, piece.numel())
        if self._header:
            # frexp: |largest| = mantissa * 2**exponent with mantissa below 1, so nothing exceeds 4 on the wire. The
            # clamp keeps 2**exponent and its inverse normal float32 numbers.
            exponent = torch.frexp(piece.abs().amax()).exponent.clamp(-126, 126)
            buffer.narrow(0, cursor, 1).copy_(exponent)
            body.copy_(torch.ldexp(piece, -exponent))
        else:
            body.copy_(piece)
        return cursor + self._header + piece.numel()

    def _unpack(self, buffer: Tensor, cursor: int, target: Tensor) -> int:
        if not target.numel():
            return cursor
        target.copy_(buffer.narrow(0, cursor + self._header, target.numel()))
        if self._header:
            target.copy_(torch.ldexp(target, buffer.narrow(0, cursor, 1).to(torch.int32)))
        return cursor + self._header + target.numel()
