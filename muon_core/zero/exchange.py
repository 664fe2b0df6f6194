"""Shards of matrices to their owners, and whole updates back as shards.

A matrix that lies whole on a rank never travels. The others do, in chunks: a chunk is one all-to-all there and one
back, and holds at most `bucket_elements` elements (or a single larger parameter), so scratch is bounded and shared.
What the owner already holds of a matrix is copied there and back on its own device.
Momentum never travels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muon_core.zero.layout import Fragment, PlacedParameter

# Fewer, larger batches: a launch costs the host about as long as a small batch costs a GPU.
DEFAULT_BUCKET_ELEMENTS: Final = 1 << 26


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

    A transfer is started, and finished later: in between, its all-to-all runs beside whatever the caller computes.
    Every rank must start the same transfers in the same order. Two chunks may be under way to their owners, and one
    back, at a time.

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
        self._turn = 0
        self.num_collectives = 0
        self.elements_sent = 0
        """Elements that left this rank."""

    def to_owners(
        self, chunk: Sequence[Traveller], parameters: Sequence[PlacedParameter], shard: Tensor
    ) -> Callable[[], dict[int, Tensor]]:
        """Start collecting the chunk's parameters at their owners.

        Collective: every rank of the group, the same chunk.

        Returns:
            What finishes the transfer: it gives new 1-D float32 tensors, by position, of what this rank owns.
        """
        owned = [t.position for t in chunk if t.owner == self.rank]
        outgoing = [
            [
                shard.narrow(0, fragment.offset, fragment.numel)
                for fragment in self._pieces([t.position for t in chunk if t.owner == rank], parameters, self.rank)
            ]
            for rank in range(self.world_size)
        ]
        # One allocation: the owner's matrices lie side by side.
        sizes = [parameters[p].numel for p in owned]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=shard.device)
        whole = dict(zip(owned, flat.split(sizes), strict=True))
        incoming = [
            [
                whole[position].narrow(0, fragment.start, fragment.numel)
                for position in owned
                for fragment in self._pieces([position], parameters, rank)
            ]
            for rank in range(self.world_size)
        ]
        # The chunk before may still be on its way: it has buffers of its own.
        self._turn = 1 - self._turn
        arrive = self._start(f"to owners {self._turn}", outgoing, incoming, shard.device)

        def finish() -> dict[int, Tensor]:
            arrive()
            return whole

        return finish

    def from_owners(
        self,
        chunk: Sequence[Traveller],
        parameters: Sequence[PlacedParameter],
        whole: dict[int, Tensor],
        shard: Tensor,
    ) -> Callable[[], None]:
        """Start writing the owners' results back into every rank's shard; collective like `to_owners`.

        Returns:
            What finishes the transfer. The shard is whole again only then.
        """
        owned = [t.position for t in chunk if t.owner == self.rank]
        outgoing = [
            [
                whole[position].narrow(0, fragment.start, fragment.numel)
                for position in owned
                for fragment in self._pieces([position], parameters, rank)
            ]
            for rank in range(self.world_size)
        ]
        incoming = [
            [
                shard.narrow(0, fragment.offset, fragment.numel)
                for fragment in self._pieces([t.position for t in chunk if t.owner == rank], parameters, self.rank)
            ]
            for rank in range(self.world_size)
        ]
        return self._start("from owners", outgoing, incoming, shard.device)

    @staticmethod
    def _pieces(positions: Sequence[int], parameters: Sequence[PlacedParameter], rank: int) -> Iterator[Fragment]:
        """A rank's pieces of some parameters, those that have an element there."""
        for position in positions:
            fragment = parameters[position].fragments[rank]
            if fragment.numel:
                yield fragment

    def _start(
        self,
        name: str,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[Sequence[Tensor]],
        device: torch.device,
    ) -> Callable[[], None]:
        """Send every rank its pieces; return what waits for the others' and puts them into `incoming`.

        What stays on this rank is copied, and never rounded.
        """
        stays, comes = outgoing[self.rank], incoming[self.rank]
        sent = [row if rank != self.rank else [] for rank, row in enumerate(outgoing)]
        received = [row if rank != self.rank else [] for rank, row in enumerate(incoming)]
        sizes_out = [self._wire_elements(row) for row in sent]
        sizes_in = [self._wire_elements(row) for row in received]
        send = self._buffer(f"send {name}", sum(sizes_out), device)
        arrival = self._buffer(f"receive {name}", sum(sizes_in), device)
        self._pack(send, [piece for row in sent for piece in row])
        work = dist.all_to_all_single(arrival, send, sizes_in, sizes_out, group=self.process_group, async_op=True)
        self.num_collectives += 1
        self.elements_sent += sum(sizes_out)

        def finish() -> None:
            if comes:
                torch._foreach_copy_(list(comes), list(stays))
            work.wait()
            self._unpack(arrival, [target for row in received for target in row])

        return finish

    def _wire_elements(self, row: Sequence[Tensor]) -> int:
        return sum(piece.numel() + self._header for piece in row)

    def _buffer(self, name: str, elements: int, device: torch.device) -> Tensor:
        """Return the first `elements` of a scratch buffer that grows to the largest chunk and is then reused."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < elements or buffer.device != device:
            buffer = torch.empty(elements, dtype=self.wire_dtype, device=device)
            self._scratch[name] = buffer
        return buffer.narrow(0, 0, elements)

    def _bodies(self, buffer: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The buffer cut like the pieces, each with its header in front."""
        return list(buffer.split([piece.numel() + self._header for piece in pieces])) if pieces else []

    def _pack(self, buffer: Tensor, pieces: Sequence[Tensor]) -> None:
        bodies = self._bodies(buffer, pieces)
        if not self._header:
            if pieces:
                torch._foreach_copy_(bodies, list(pieces))
            return
        for body, piece in zip(bodies, pieces, strict=True):
            # frexp: |largest| = mantissa * 2**exponent with mantissa below 1, so nothing exceeds 4 on the wire. The
            # clamp keeps 2**exponent and its inverse normal float32 numbers.
            exponent = torch.frexp(piece.abs().amax()).exponent.clamp(-126, 126)
            body[:1].copy_(exponent)
            body[1:].copy_(torch.ldexp(piece, -exponent))

    def _unpack(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        bodies = self._bodies(buffer, targets)
        if not self._header:
            if targets:
                torch._foreach_copy_(list(targets), bodies)
            return
        for body, target in zip(bodies, targets, strict=True):
            target.copy_(torch.ldexp(body[1:].float(), body[:1].to(torch.int32)))
