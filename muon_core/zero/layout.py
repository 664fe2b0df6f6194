"""Where each parameter's elements lie in ZeRO's flat fp32 partitions, for stages 1, 2 and 3.

ZeRO's words: a *partition* is the flat tensor that one rank's optimizer steps on, one for each parameter group at
stages 1 and 2, one for each sub-group at stage 3. Every rank can compute every rank's layout, so none is exchanged.

`ZeroPartitions` is the one place that knows DeepSpeed's private attributes at every stage; the rest of `zero/` asks it.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_core.errors import NotAttached, UnsupportedSetup
from muon_core.parameters import MatrixShape, full_shape, trainable_parameters

MomentumKind = Literal["muon", "adamw"]
MOMENTUM_KEYS: Final[dict[MomentumKind, str]] = {"muon": "momentum_buffer", "adamw": "exp_avg"}


class MomentumView(NamedTuple):
    """One parameter's momentum on this rank: a 1-D view of the live buffer, never a copy."""

    parameter_index: int
    view: Tensor
    kind: MomentumKind


@dataclass(frozen=True, slots=True)
class Fragment:
    """The piece of one parameter that lies in one rank's partition; `numel` 0 where none does."""

    start: int
    """The piece's first element within the parameter."""
    numel: int
    offset: int
    """Where the piece begins in the partition."""


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """One parameter of a partition, and where all of it lies."""

    index: int
    numel: int
    fragments: tuple[Fragment, ...]
    """By rank."""
    matrices: MatrixShape | None = None
    """How Muon views it; None under AdamW and under DeepSpeed's own Muon."""


@dataclass(frozen=True, slots=True)
class Partition:
    """One flat partition's parameters, in the order of their elements."""

    number: int
    group_index: int
    """Its parameter group's position in the optimizer's `param_groups`."""
    parameters: tuple[PlacedParameter, ...]


class Attachment(Protocol):
    """What an implementation keeps for an engine: `ZeroMuon`, or DeepSpeed's own Muon."""

    ns_calls: int
    last_update_norm_squared: Tensor | None

    def momentum_views(self) -> list[MomentumView]: ...


_ATTACHMENTS: WeakKeyDictionary[Any, Attachment] = WeakKeyDictionary()


def register_attachment(engine: Any, attachment: Attachment) -> None:
    _ATTACHMENTS[engine] = attachment


def attachment_of(engine: Any) -> Attachment:
    """Return what `attach` or `deepspeed_native.install` left for this engine; raises NotAttached."""
    attachment = _ATTACHMENTS.get(engine)
    if attachment is None:
        raise NotAttached("this engine has no Muon of ours", "call muon_core.attach or deepspeed_native.install first")
    return attachment


def momentum_views(engine: Any) -> list[MomentumView]:
    """Return this rank's live momentum, parameter by parameter; cheap enough for every step.

    A parameter without an element on this rank is left out, and so is momentum that does not exist yet. Over all
    ranks, the views hold every element exactly once.
    """
    return attachment_of(engine).momentum_views()


class ZeroPartitions(ABC):
    """One engine's ZeRO partitions, read alike at every stage."""

    def __init__(self, engine: Any, matrices: dict[int, MatrixShape | None]) -> None:
        """Args: `matrices` says by `id(parameter)` how Muon views it."""
        self.zero = engine.optimizer
        self.device = torch.device(engine.device)
        """Where this rank computes and communicates; offloaded partitions lie on the CPU."""
        self.process_group: dist.ProcessGroup = self.zero.dp_process_group
        self.rank = dist.get_rank(self.process_group)
        self.world_size = dist.get_world_size(self.process_group)
        trainable = trainable_parameters(engine.module)
        indices = {id(parameter): index for index, (_, parameter) in enumerate(trainable)}
        # Kept: a parameter that is frozen later stays where it is in its partition.
        self.names = tuple(name for name, _ in trainable)
        """Of the parameters that required a gradient at attachment, by parameter index."""
        self.shapes = tuple(full_shape(parameter) for _, parameter in trainable)
        self._indices, self._matrices = indices, matrices
        self.partitions: tuple[Partition, ...] = self._place()

    @property
    @abstractmethod
    def stage(self) -> int: ...

    @property
    def is_offloaded(self) -> bool:
        """Whether DeepSpeed keeps fp32 weights and gradients, and with them all state of ours, on the CPU."""
        return _offloads_optimizer(self.zero)

    def forget_gradients(self) -> None:
        """Zero the gradients that DeepSpeed keeps from step to step, under offload and at stage 3.

        It overwrites only those of parameters that take part in the next backward pass: what a step left, infinity
        included, would be a later one's gradient otherwise.
        """
        if self.is_offloaded:
            for partition in self.partitions:
                gradient = self.flat(partition).grad
                assert gradient is not None
                gradient.zero_()

    def _offloaded_gradient(self, partition: Partition) -> Tensor:
        gradient = self.flat(partition).grad
        assert gradient is not None
        return self._unscaled(gradient)

    @abstractmethod
    def _place(self) -> tuple[Partition, ...]: ...

    @abstractmethod
    def flat(self, partition: Partition) -> Tensor:
        """Return this rank's fp32 weights of a partition: the optimizer's own parameter."""

    @abstractmethod
    def reduced_gradient(self, partition: Partition) -> Tensor:
        """Return a fresh fp32 copy of this rank's averaged gradient, loss scale divided out, clipping not applied."""

    def gradient_pieces(self, partition: Partition) -> Sequence[Tensor]:
        """Return this rank's averaged gradients of a partition as DeepSpeed keeps them, loss-scaled, not copied."""
        pieces: Sequence[Tensor] = self.zero.averaged_gradients[partition.number]
        return pieces

    @abstractmethod
    def spoil_gradient(self, partition: Partition, is_finite: Tensor) -> None:
        """Make DeepSpeed's check see a non-finite gradient where `is_finite`, a device flag, is false."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Bring fp32 weights that were written from outside into the model on every rank; collective."""

    def of_flat(self, flat: Tensor) -> Partition:
        """Return the partition whose weights `flat` is; DeepSpeed hands the optimizer nothing else."""
        for partition in self.partitions:
            if self.flat(partition) is flat:
                return partition
        raise NotAttached(
            "the optimizer was stepped on a tensor that is no partition of the attached engine",
            "attach it to the engine that steps it",
        )

    def digest(self) -> str:
        """Hash the whole layout: equal on every rank, or the ranks do not train the same model."""
        return hashlib.sha256(repr(self.partitions).encode()).hexdigest()

    def _placed(self, parameter: nn.Parameter, fragments: tuple[Fragment, ...]) -> PlacedParameter:
        numel = sum(fragment.numel for fragment in fragments)
        return PlacedParameter(self._indices[id(parameter)], numel, fragments, self._matrices.get(id(parameter)))

    def _unscaled(self, gradient: Tensor) -> Tensor:
        unscaled = torch.empty(gradient.numel(), dtype=torch.float32, device=gradient.device).copy_(gradient.view(-1))
        scale = float(self.zero.loss_scale)
        return unscaled.mul_(1.0 / scale) if scale != 1.0 else unscaled


class StageOneTwoPartitions(ZeroPartitions):
    """Each group's parameters laid end to end and cut into equal partitions: a parameter may straddle a cut."""

    @property
    def stage(self) -> int:
        return 2 if self.zero.partition_gradients else 1

    def _place(self) -> tuple[Partition, ...]:
        zero, partitions = self.zero, []
        for group_index, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[group_index])
            offsets = _offsets_of(zero, group_index)
            placed = [
                self._placed(parameter, cut_into_partitions(int(offset), parameter.numel(), size, self.world_size))
                for parameter, offset in zip(parameters, offsets, strict=True)
            ]
            partitions.append(Partition(group_index, group_index, tuple(placed)))
        return tuple(partitions)

    def flat(self, partition: Partition) -> Tensor:
        return self.zero.single_partition_of_fp32_groups[partition.number]

    def reduced_gradient(self, partition: Partition) -> Tensor:
        if self.is_offloaded:
            return self._offloaded_gradient(partition)
        zero, number = self.zero, partition.number
        flat = zero._get_preflattened_grad_partition(number)
        if flat is None:
            # The last rank's pieces may end before its partition does.
            flat = zero.flatten_dense_tensors_aligned(zero.averaged_gradients[number], int(zero.partition_size[number]))
        return self._unscaled(flat)

    def spoil_gradient(self, partition: Partition, is_finite: Tensor) -> None:
        for piece in self.zero.averaged_gradients[partition.number]:
            if piece.numel() and not getattr(piece, "_zero_padding", False):
                _spoil(piece, is_finite)
                return

    def publish_weights(self) -> None:
        self.zero.update_lp_params()
        for group_index in range(len(self.zero.bit16_groups)):
            self.zero._update_model_bit16_weights(group_index)


class StageThreePartitions(ZeroPartitions):
    """Every parameter cut into one equal piece a rank; a sub-group's pieces laid end to end."""

    @property
    def stage(self) -> int:
        return 3

    def _place(self) -> tuple[Partition, ...]:
        zero, partitions = self.zero, []
        for number, parameters in enumerate(zero.fp16_groups):
            placed = []
            for parameter in parameters:
                offset = int(zero.grad_position[zero.get_param_id(parameter)][1])
                piece = int(parameter.partition_numel())
                placed.append(
                    self._placed(parameter, cut_evenly(int(parameter.ds_numel), piece, offset, self.world_size))
                )
            partitions.append(Partition(number, int(zero.sub_group_to_group_id[number]), tuple(placed)))
        return tuple(partitions)

    def flat(self, partition: Partition) -> Tensor:
        return self.zero.fp32_partitioned_groups_flat[partition.number]

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.zero.grad_partitions_flat_buffer.zero_()

    def reduced_gradient(self, partition: Partition) -> Tensor:
        if self.is_offloaded:
            return self._offloaded_gradient(partition)
        return self._unscaled(self.zero.flatten(self.zero.averaged_gradients[partition.number]))

    def spoil_gradient(self, partition: Partition, is_finite: Tensor) -> None:
        pieces = self.zero.averaged_gradients[partition.number]
        for parameter, piece in zip(partition.parameters, pieces, strict=True):
            if parameter.fragments[self.rank].numel:
                _spoil(piece, is_finite)
                return

    def publish_weights(self) -> None:
        zero = self.zero
        zero._partition_all_parameters()
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[number].data.copy_(flat.data)
            zero._unflatten_partitioned_parameters(number)
        zero.checkpoint_event_epilogue()


def _offsets_of(zero: Any, group_index: int) -> Sequence[int]:
    """Return where each of a group's parameters begins in it, at stages 1 and 2."""
    if hasattr(zero, "round_robin_bit16_offsets"):
        offsets: Sequence[int] = zero.round_robin_bit16_offsets[group_index]
        return offsets
    # Releases that keep no offsets lay the parameters end to end, without a gap.
    numels = [parameter.numel() for parameter in zero.round_robin_bit16_groups[group_index]]
    return list(accumulate(numels, initial=0))[:-1]


def cut_into_partitions(first: int, numel: int, partition_size: int, world_size: int) -> tuple[Fragment, ...]:
    """Cut the elements [first, first + numel) of a flat group at the partition boundaries."""
    fragments = []
    for rank in range(world_size):
        begin = max(first, rank * partition_size)
        end = min(first + numel, (rank + 1) * partition_size)
        if begin < end:
            fragments.append(Fragment(begin - first, end - begin, begin - rank * partition_size))
        else:
            fragments.append(Fragment(0, 0, 0))
    return tuple(fragments)


def cut_evenly(numel: int, piece: int, offset: int, world_size: int) -> tuple[Fragment, ...]:
    """Cut a parameter into pieces of `piece` elements, the last ones shorter or empty."""
    fragments = []
    for rank in range(world_size):
        start = min(rank * piece, numel)
        fragments.append(Fragment(start, min(piece, numel - start), offset))
    return tuple(fragments)


def partitions_of(engine: Any, matrices: dict[int, MatrixShape | None]) -> ZeroPartitions:
    """Read an engine's layout.

    Raises:
        UnsupportedSetup: an optimizer wrapper, offload or parallelism whose partitions are laid out otherwise.
    """
    zero = engine.optimizer
    reason = _unsupported_reason(engine)
    if reason is not None:
        raise UnsupportedSetup(*reason)
    kinds: dict[str, Callable[..., ZeroPartitions]] = {
        "DeepSpeedZeroOptimizer": StageOneTwoPartitions,
        "DeepSpeedZeroOptimizer_Stage3": StageThreePartitions,
    }
    return kinds[type(zero).__name__](engine, matrices)


def _unsupported_reason(engine: Any) -> tuple[str, str] | None:
    zero = engine.optimizer
    name = type(zero).__name__
    if name == "BF16_Optimizer":
        return (
            "bf16 at ZeRO stage 1 with fp32 gradient accumulation runs in DeepSpeed's BF16_Optimizer, "
            "whose partitions are laid out otherwise",
            "use stage 2 or 3, or data_types.grad_accum_dtype bf16",
        )
    if name not in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        return f"the engine's optimizer is {name}, which is not ZeRO stage 1, 2 or 3", "set zero_optimization.stage"
    if _offloads_optimizer(zero):
        if getattr(zero, "swap_optimizer", False):
            return "offload_optimizer to nvme swaps state that muon_core keeps", "offload to the device cpu"
        if getattr(zero, "zenflow", False):
            return "zenflow steps parts of a partition at other times than the rest", "remove zenflow"
    if getattr(zero, "offload_param", False):
        return "offload_param is not supported by muon_core", "remove it from zero_optimization"
    if getattr(zero, "has_moe_layers", False) or getattr(engine, "has_moe_layers", False):
        return "expert-parallel layers have partition groups of their own", "train without expert parallelism"
    if zero.torch_autocast_gradscaler is not None:
        return "torch_autocast in float16 scales the loss outside DeepSpeed's sight", "use fp16 or bf16 instead"
    if zero.model_parallel_group is not None and dist.get_world_size(zero.model_parallel_group) > 1:
        return "tensor parallelism splits matrices beyond ZeRO's partitions", "train with data parallelism alone"
    if name == "DeepSpeedZeroOptimizer_Stage3":
        ranks = dist.get_process_group_ranks(zero.dp_process_group)
        groups = getattr(zero, "sub_group_process_groups", ())  # releases to 0.19.2 know of no other group
        if any(dist.get_process_group_ranks(group) != ranks for group in groups):
            return "some parameters are partitioned over another group than the data-parallel one", "use one group"
        empty = [name for name, parameter in engine.module.named_parameters() if not parameter.ds_numel]
        if empty and len(ranks) > 1:
            return f"{empty[0]} has no elements, and DeepSpeed's stage 3 cannot gather it", "use stage 1 or 2"
        flats = zero.fp32_partitioned_groups_flat
    else:
        flats = zero.single_partition_of_fp32_groups
    dtypes = {flat.dtype for flat in flats}
    if dtypes != {torch.float32}:
        return f"master weights of {dtypes} are not float32", "leave *_master_weights_and_grads off"
    return None


def _offloads_optimizer(zero: Any) -> bool:
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


def _spoil(piece: Tensor, is_finite: Tensor) -> None:
    """Write infinity into a piece's first element unless the device flag holds, without reading it on the host."""
    first = piece.view(-1)[:1]
    first.copy_(torch.where(is_finite, first, torch.full_like(first, float("inf"))))


class ViewCache:
    """Momentum views, made anew only when a buffer they look into has been replaced."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = []
        self._views: list[MomentumView] = []

    def views(self, buffers: Sequence[Tensor | None], make: Callable[[], Iterable[MomentumView]]) -> list[MomentumView]:
        """Return the cached views if these are the very buffers they were made of, else make and keep them."""
        is_current = len(buffers) == len(self._buffers) and all(
            new is old for new, old in zip(buffers, self._buffers, strict=True)
        )
        if not is_current:
            self._buffers, self._views = list(buffers), list(make())
        return self._views
