"""DeepSpeed 0.19.8's own Muon, and its five step orderings: the published numbers.

DeepSpeed's arithmetic, Newton-Schulz and momentum (in loss-scaled units) stay as they are, and so do its state and
checkpoints. At stages 1 and 2 it runs Muon while the gradient partition is filled, one `muon_update` a matrix, looked
up in its module at each call: there, and only while this engine fills, the ordering's own update stands in.

    deferred     0.19.8 as released: into a staged copy, committed when the step survives (stages 1, 2; at stage 3,
                 at the step, after the check)
    per_tensor   no staging: only a tensor's own non-finite gradient is kept from its momentum
    master       no staging and no guard, as released up to 0.19.6
    inverted     as per_tensor, undone by arithmetic when the step is discarded: not bit-exact
    precheck     after an all-reduce of its own, once every group's gradient is complete
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muon_core.errors import UnsupportedSetup
from muon_core.zero.layout import (
    MomentumKind,
    MomentumView,
    Partition,
    ViewCache,
    ZeroPartitions,
    partitions_of,
    register_attachment,
)
from muon_core.zero.precision import StepHooks

# DeepSpeed releases this module has been held against; its private seams may move in any other.
DEEPSPEED_RELEASE: Final = "0.19.8"
ORDERINGS: Final[dict[int, tuple[str, ...]]] = {
    1: ("master", "per_tensor", "inverted", "precheck", "deferred"),
    2: ("master", "per_tensor", "inverted", "precheck", "deferred"),
    3: ("deferred",),
}

MuonUpdate = Callable[..., Tensor]


def install(engine: Any, step_ordering: str) -> "NativeMuon":
    """Run an engine's own Muon under an ordering; call on every rank, after `deepspeed.initialize`.

    The engine must have been initialised with DeepSpeed's `"Muon"` optimizer block.

    Raises:
        UnsupportedSetup: another optimizer, release or ZeRO layout, or an ordering its stage does not have.
    """
    import deepspeed

    if not deepspeed.__version__.startswith(DEEPSPEED_RELEASE):
        raise UnsupportedSetup(
            f"DeepSpeed {deepspeed.__version__} is not {DEEPSPEED_RELEASE}, whose Muon this runs",
            "run another release unmodified, without an ordering",
        )
    if type(getattr(engine.optimizer, "optimizer", None)).__name__ != "MuonWithAuxAdam":
        raise UnsupportedSetup(
            "the engine does not run DeepSpeed's own Muon", 'give deepspeed.initialize an optimizer block "Muon"'
        )
    native = NativeMuon(engine)
    if step_ordering not in ORDERINGS[native.stage]:
        raise UnsupportedSetup(
            f"DeepSpeed's own Muon has no ordering {step_ordering!r} at ZeRO stage {native.stage}",
            f"choose one of {', '.join(ORDERINGS[native.stage])}",
        )
    native.use(_KINDS[step_ordering](native))
    register_attachment(engine, native)
    return native


class Deferred:
    """0.19.8 as it is: the stock update, into the staged copy."""

    is_staged = True
    num_all_reduces = 0

    def __init__(self, native: "NativeMuon") -> None:
        self.native = native

    def update(self, stock: MuonUpdate, grad: Tensor, momentum: Tensor, beta: float, **options: Any) -> Tensor:
        return stock(grad, momentum, beta, **options)

    def after_reduction(self, stock: MuonUpdate) -> None:
        """Every group's partition is filled; called at the end of a reduction that reached the boundary."""

    def after_step(self, overflow: bool) -> None:
        """The step was applied or discarded."""


class PerTensor(Deferred):
    is_staged = False


class Master(Deferred):
    is_staged = False

    def update(self, stock: MuonUpdate, grad: Tensor, momentum: Tensor, beta: float, **options: Any) -> Tensor:
        return unguarded_muon_update(grad, momentum, beta, **options)


class Inverted(Deferred):
    is_staged = False

    def __init__(self, native: "NativeMuon") -> None:
        super().__init__(native)
        self._moves: list[tuple[Tensor, Tensor, float, Tensor]] = []

    def update(self, stock: MuonUpdate, grad: Tensor, momentum: Tensor, beta: float, **options: Any) -> Tensor:
        self._moves.append((momentum, grad.clone(), beta, torch.isfinite(grad).all()))
        return stock(grad, momentum, beta, **options)

    def after_step(self, overflow: bool) -> None:
        if overflow:
            for momentum, grad, beta, is_finite in self._moves:
                undone = (momentum - (1 - beta) * grad) / beta
                momentum.copy_(torch.where(is_finite, undone, momentum))
        self._moves.clear()


class Precheck(Deferred):
    is_staged = False

    def __init__(self, native: "NativeMuon") -> None:
        super().__init__(native)
        self._pending: list[tuple[Tensor, Tensor, float, dict[str, Any]]] = []

    def update(self, stock: MuonUpdate, grad: Tensor, momentum: Tensor, beta: float, **options: Any) -> Tensor:
        self._pending.append((grad, momentum, beta, options))
        return grad

    def after_reduction(self, stock: MuonUpdate) -> None:
        zero = self.native.partitions.zero
        nonfinite = zero.has_overflow_partitioned_grads_serial().to(torch.uint8)
        dist.all_reduce(nonfinite, op=dist.ReduceOp.MAX, group=self.native.partitions.process_group)
        self.num_all_reduces += 1
        if not nonfinite.item():
            for grad, momentum, beta, options in self._pending:
                # The partition's pieces are views of this very gradient.
                grad.copy_(stock(grad.clone(), momentum, beta, **options))
                self.native.ns_calls += 1
        self._pending.clear()


_KINDS: Final[dict[str, type[Deferred]]] = {
    "deferred": Deferred,
    "per_tensor": PerTensor,
    "master": Master,
    "inverted": Inverted,
    "precheck": Precheck,
}


def unguarded_muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """DeepSpeed's `muon_update` before it had a guard: whatever the gradient holds moves the momentum."""
    from deepspeed.runtime.zero.muon import original_muon

    momentum.lerp_(grad, 1 - beta)
    direction = grad.lerp_(momentum, beta) if nesterov else momentum
    if num_heads is not None:
        return original_muon._per_head_orthogonalize(direction, num_heads, ns_steps, ns_method).to(grad.dtype)
    if direction.ndim == 4 and not is_expert_group:
        direction = direction.view(len(direction), -1)
    iterate = (
        original_muon.zeropower_via_gram_newtonschulz
        if ns_method == "gram"
        else original_muon.zeropower_via_newtonschulz5
    )
    scale = original_muon._aspect_ratio_scale(grad.size(-2), grad.size(-1))
    return (iterate(direction, steps=ns_steps) * scale).to(grad.dtype).view_as(grad)


class NativeMuon:
    """DeepSpeed's Muon on one engine, counted and read; the attachment of such engines."""

    def __init__(self, engine: Any) -> None:
        self.partitions: ZeroPartitions = partitions_of(engine, {})
        self.stage = self.partitions.stage
        self.ns_calls = 0
        """Parameters orthogonalized on this rank so far."""
        self.last_update_norm_squared: Tensor | None = None
        """This rank's squared norm of the newest applied Muon update, before lr; None if none was applied."""
        self._optimizer = engine.optimizer.optimizer
        self._views = ViewCache()
        self._ordering = Deferred(self)

    @property
    def ordering(self) -> Deferred:
        return self._ordering

    def use(self, ordering: Deferred) -> None:
        """Install an ordering into the ZeRO optimizer."""
        self._ordering = ordering
        zero = self.partitions.zero
        self._optimizer.register_step_pre_hook(self._measure_update)
        StepHooks(zero, self, hold_scale=False)
        if self.stage == 3:
            zero._muon_update_sub_group = self._standing_in(zero._muon_update_sub_group)
            return
        zero.get_flat_partition = self._standing_in(zero.get_flat_partition)
        if not ordering.is_staged:
            zero._muon_staging_momentum = self._committed_momentum
        epilogue = zero.independent_gradient_partition_epilogue

        def reduce_then_tell() -> None:
            epilogue()
            if zero.is_gradient_accumulation_boundary():
                from deepspeed.runtime.zero.muon import original_muon

                ordering.after_reduction(original_muon.muon_update)

        zero.independent_gradient_partition_epilogue = reduce_then_tell

    def before_check(self) -> None:
        self.last_update_norm_squared = None

    def survived(self) -> None:
        """DeepSpeed's own order is kept: nothing is done here."""

    def after_step(self, overflow: bool) -> None:
        with torch.no_grad():
            self._ordering.after_step(overflow)

    def momentum_views(self) -> list[MomentumView]:
        buffers = [self._momentum_buffer(partition) for partition in self.partitions.partitions]
        return self._views.views(buffers, lambda: self._make_views(buffers))

    def _kind(self, partition: Partition) -> MomentumKind:
        return "muon" if self._optimizer.param_groups[partition.group_index]["use_muon"] else "adamw"

    def _momentum_buffer(self, partition: Partition) -> Tensor | None:
        key = "momentum_buffer" if self._kind(partition) == "muon" else "exp_avg"
        return self._optimizer.state.get(self.partitions.flat(partition), {}).get(key)

    def _make_views(self, buffers: Sequence[Tensor | None]) -> list[MomentumView]:
        views = []
        for partition, buffer in zip(self.partitions.partitions, buffers, strict=True):
            if buffer is None:
                continue
            kind = self._kind(partition)
            # Stages 1 and 2 keep the whole momentum of every matrix with an element here, end to end.
            holds_whole = kind == "muon" and self.stage < 3
            whole_offset = 0
            for parameter in partition.parameters:
                fragment = parameter.fragments[self.partitions.rank]
                if not fragment.numel:
                    continue
                offset = whole_offset + fragment.start if holds_whole else fragment.offset
                views.append(MomentumView(parameter.index, buffer.narrow(0, offset, fragment.numel), kind))
                whole_offset += parameter.numel
        return sorted(views, key=lambda view: view.parameter_index)

    def _committed_momentum(self, flatten_copy: Tensor, param_group_idx: int) -> Tensor:
        return self._optimizer.state[flatten_copy]["momentum_buffer"]

    def _measure_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"] if group["use_muon"] else ():
                if flat.grad is not None:
                    norm_squared = torch.linalg.vector_norm(flat.grad).square()
                    previous = self.last_update_norm_squared
                    self.last_update_norm_squared = norm_squared if previous is None else previous + norm_squared

    def _standing_in(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def with_our_update(*args: Any, **kwargs: Any) -> Any:
            with self._update_in_place():
                return method(*args, **kwargs)

        return with_our_update

    @contextmanager
    def _update_in_place(self) -> Iterator[None]:
        """Let DeepSpeed find the ordering's update where it looks up its own."""
        from deepspeed.runtime.zero.muon import original_muon

        stock = original_muon.muon_update

        def counted(grad: Tensor, momentum: Tensor, beta: float, **options: Any) -> Tensor:
            self.ns_calls += not isinstance(self._ordering, Precheck)
            return self._ordering.update(stock, grad, momentum, beta, **options)

        original_muon.muon_update = counted
        try:
            yield
        finally:
            original_muon.muon_update = stock
