"""When the momentum moves, relative to the overflow check: `ordered`, and five others for comparison only.

All six run the same arithmetic on the same shards; a run differs from another in the moment of `_blend` alone. Without
clipping they are therefore equal bit for bit until the first overflow.

    ordered      at the step, after the check (the optimizer's own `step()`): nothing to undo, nothing to stage
    master       before the check, unconditionally
    per_tensor   before the check, unless this tensor's own gradient is non-finite; that gradient is still passed on
    inverted     as per_tensor, undone by arithmetic when the step is discarded: not bit-exact
    precheck     before the check, after an all-reduce of its own
    deferred     before the check into a copy, committed when the step survives

At stage 3 `master`, `per_tensor` and `inverted` move the momentum, and orthogonalize, once per micro-batch, as
DeepSpeed's releases to 0.19.7 did. `precheck` and `deferred` need the complete gradient and act at the boundary.
"""

from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muon_core.errors import UnsupportedSetup
from muon_core.muon import blend_momentum_
from muon_core.zero.layout import Partition, ZeroPartitions

STEP_ORDERINGS: Final = ("master", "per_tensor", "inverted", "precheck", "deferred", "ordered")

Group = dict[str, Any]


class Host(Protocol):
    """What an ordering needs of the optimizer."""

    @property
    def partitions(self) -> ZeroPartitions: ...

    def group_of(self, partition: Partition) -> Group: ...

    def momentum_of(self, partition: Partition) -> Tensor: ...

    def orthogonalize_shards_(self, partition: Partition, group: Group, shard: Tensor) -> None: ...


class Ordered:
    """Blend when the optimizer steps: DeepSpeed calls it only after its check, with unscaled and clipped gradients."""

    num_all_reduces = 0
    staged_bytes = 0

    def __init__(self, host: Host) -> None:
        self.host = host

    def before_check(self) -> None:
        """Nothing moves before the check."""

    def after_step(self, overflow: bool) -> None:
        """Nothing is left over."""

    def take_update(self, partition: Partition, gradient: Tensor) -> Tensor:
        """Return this rank's shard of the update; called once the step is known to survive."""
        group = self.host.group_of(partition)
        direction = _blend(gradient, self.host.momentum_of(partition), group)
        self.host.orthogonalize_shards_(partition, group, direction)
        return direction


class Master(Ordered):
    """Blend before the check, so that whatever the gradient holds reaches the momentum for good."""

    moves_per_micro_batch = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._directions: dict[int, Tensor] = {}
        # Stage 3: what the accumulation window's earlier micro-batches have orthogonalized, and their gradients.
        self._finished: dict[int, Tensor] = {}
        self._earlier: dict[int, list[Tensor]] = {}
        self._muon = [p for p in host.partitions.partitions if host.group_of(p)["route"] == "muon"]
        if host.partitions.stage == 3 and self.moves_per_micro_batch:
            self._hook_micro_batches()

    def before_check(self) -> None:
        for partition in self._muon:
            self._move(partition)
            earlier = self._earlier.pop(partition.number, None)
            if earlier is not None:
                # The last micro-batch has moved the momentum; the norm that DeepSpeed takes is the whole window's.
                torch._foreach_add_(list(self.host.partitions.gradient_pieces(partition)), earlier)

    def after_step(self, overflow: bool) -> None:
        self._directions.clear()
        self._finished.clear()

    def take_update(self, partition: Partition, gradient: Tensor) -> Tensor:
        direction = self._directions.pop(partition.number)
        self.host.orthogonalize_shards_(partition, self.host.group_of(partition), direction)
        finished = self._finished.pop(partition.number, None)
        return direction if finished is None else direction.add_(finished)

    def _move(self, partition: Partition) -> None:
        direction = self._directions[partition.number] = self._moved(partition)
        is_finite = torch.isfinite(direction).all()
        finished = self._finished.get(partition.number)
        if finished is not None:
            is_finite = is_finite & torch.isfinite(finished).all()
        # The check sees the update in the gradient's place, as it does where Muon runs inside the reduction.
        self.host.partitions.spoil_gradient(partition, is_finite)

    def _moved(self, partition: Partition) -> Tensor:
        gradient = self.host.partitions.reduced_gradient(partition)
        return _blend(gradient, self.host.momentum_of(partition), self.host.group_of(partition))

    def _hook_micro_batches(self) -> None:
        """Keep each micro-batch's Muon gradient apart, and finish its update before the next one arrives."""
        zero = self.host.partitions.zero
        muon_ids = {zero.get_param_id(p) for partition in self._muon for p in zero.fp16_groups[partition.number]}
        partition_grads, epilogue = zero.partition_grads, zero.independent_gradient_partition_epilogue

        def copy_muon_and_add_the_rest(parameters: list[Any], pieces: list[Tensor]) -> list[Tensor]:
            buffers: list[Tensor] = []
            micro_step = zero.micro_step_id
            for parameter, piece in zip(parameters, pieces, strict=True):
                # DeepSpeed copies on micro-step 0 and adds on the others.
                zero.micro_step_id = 0 if zero.get_param_id(parameter) in muon_ids else micro_step
                buffers += partition_grads([parameter], [piece])
            zero.micro_step_id = micro_step
            return buffers

        def finish_all_but_the_last() -> None:
            if zero._epilogue_ran_this_backward:
                raise UnsupportedSetup(
                    "with reentrant checkpointing one backward pass reduces gradients more than once",
                    "use_reentrant=False, or the ordering ordered, precheck or deferred",
                )
            epilogue()
            if not zero.is_gradient_accumulation_boundary():
                for partition in self._muon:
                    self._finish_micro_batch(partition)

        zero.partition_grads = copy_muon_and_add_the_rest
        zero.independent_gradient_partition_epilogue = finish_all_but_the_last

    def _finish_micro_batch(self, partition: Partition) -> None:
        update = self._moved(partition)
        self.host.orthogonalize_shards_(partition, self.host.group_of(partition), update)
        finished = self._finished.get(partition.number)
        self._finished[partition.number] = update if finished is None else finished.add_(update)
        pieces, earlier = self.host.partitions.gradient_pieces(partition), self._earlier.get(partition.number)
        if earlier is None:
            self._earlier[partition.number] = [piece.clone() for piece in pieces]
        else:
            torch._foreach_add_(earlier, list(pieces))


class PerTensor(Master):
    """Keep a tensor's momentum from its own non-finite gradient, and from nothing else."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._num_parameters = 1 + max((p.index for q in self._muon for p in q.parameters), default=-1)
        # A tensor in pieces is finite only if it is on every rank.
        self._is_split = any(
            sum(f.numel > 0 for f in parameter.fragments) > 1 for q in self._muon for parameter in q.parameters
        )

    def _moved(self, partition: Partition) -> Tensor:
        gradient = self.host.partitions.reduced_gradient(partition)
        momentum, group = self.host.momentum_of(partition), self.host.group_of(partition)
        is_finite = self._finite_elements(partition, gradient)
        moved = momentum.lerp(gradient, 1 - group["momentum"])
        self._before_writing(partition, gradient, is_finite)
        momentum.copy_(torch.where(is_finite, moved, momentum))
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
        return torch.where(is_finite, direction, gradient)

    def _before_writing(self, partition: Partition, gradient: Tensor, is_finite: Tensor) -> None:
        """A place for `inverted` to keep what it will undo."""

    def _finite_elements(self, partition: Partition, gradient: Tensor) -> Tensor:
        """Say element by element whether the whole tensor around it is finite."""
        rank = self.host.partitions.rank
        nonfinite = torch.zeros(self._num_parameters, dtype=torch.float32, device=gradient.device)
        here = [(p.index, p.fragments[rank]) for p in partition.parameters if p.fragments[rank].numel]
        for index, fragment in here:
            piece = gradient.narrow(0, fragment.offset, fragment.numel)
            nonfinite[index] = torch.isfinite(piece).all().logical_not()
        if self._is_split:
            dist.all_reduce(nonfinite, op=dist.ReduceOp.MAX, group=self.host.partitions.process_group)
            self.num_all_reduces += 1
        is_finite = torch.ones_like(gradient, dtype=torch.bool)
        for index, fragment in here:
            is_finite.narrow(0, fragment.offset, fragment.numel).copy_(nonfinite[index] == 0)
        return is_finite


class Inverted(PerTensor):
    """Undo the move of a discarded step by inverting the mean: close to what was, never the same bits."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._moves: list[tuple[Partition, Tensor, Tensor]] = []

    def after_step(self, overflow: bool) -> None:
        if overflow:
            for partition, gradient, is_finite in reversed(self._moves):
                momentum, beta = self.host.momentum_of(partition), self.host.group_of(partition)["momentum"]
                undone = (momentum - (1 - beta) * gradient) / beta if beta else torch.zeros_like(momentum)
                momentum.copy_(torch.where(is_finite, undone, momentum))
        self._moves.clear()
        super().after_step(overflow)

    def _before_writing(self, partition: Partition, gradient: Tensor, is_finite: Tensor) -> None:
        self._moves.append((partition, gradient.clone(), is_finite))
        self.staged_bytes = sum(gradient.numel() * gradient.element_size() for _, gradient, _ in self._moves)


class Precheck(Master):
    """Ask all ranks first, with an all-reduce of its own, and move nothing when any gradient is non-finite."""

    moves_per_micro_batch = False

    def before_check(self) -> None:
        partitions = self.host.partitions
        finite = [torch.isfinite(partitions.reduced_gradient(partition)).all() for partition in partitions.partitions]
        nonfinite = torch.stack(finite).all().logical_not().to(torch.uint8)
        dist.all_reduce(nonfinite, op=dist.ReduceOp.MAX, group=partitions.process_group)
        self.num_all_reduces += 1
        if not nonfinite.item():
            super().before_check()


class Deferred(Master):
    """Move a copy, and commit it once the step has survived."""

    moves_per_micro_batch = False

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._staged: dict[int, Tensor] = {}

    def take_update(self, partition: Partition, gradient: Tensor) -> Tensor:
        self.host.momentum_of(partition).copy_(self._staged[partition.number])
        return super().take_update(partition, gradient)

    def _moved(self, partition: Partition) -> Tensor:
        momentum = self.host.momentum_of(partition)
        staged = self._staged.get(partition.number)
        if staged is None or staged.shape != momentum.shape:
            staged = self._staged[partition.number] = torch.empty_like(momentum)
            self.staged_bytes += staged.numel() * staged.element_size()
        staged.copy_(momentum)
        return _blend(self.host.partitions.reduced_gradient(partition), staged, self.host.group_of(partition))


_KINDS: Final[dict[str, type[Ordered]]] = {
    "ordered": Ordered,
    "master": Master,
    "per_tensor": PerTensor,
    "inverted": Inverted,
    "precheck": Precheck,
    "deferred": Deferred,
}


def build_ordering(name: str, host: Host) -> Ordered:
    """Make the ordering of that name and hook it into the host's ZeRO optimizer."""
    return _KINDS[name](host)


def _blend(gradient: Tensor, momentum: Tensor, group: Group) -> Tensor:
    """The one movement of the momentum; orderings differ in when they call it."""
    return blend_momentum_(gradient, momentum, momentum=group["momentum"], nesterov=group["nesterov"])
