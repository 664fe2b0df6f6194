"""ZeroMuon: Muon as an ordinary optimizer on ZeRO's flat fp32 partitions.

DeepSpeed calls `step()` once per optimizer step and only after its own overflow check, with gradients accumulated,
reduced, unscaled and clipped. So a discarded step never arrives here, and the momentum cannot absorb it: nothing is
staged, no collective is added. In `step()`, for one partition at a time:

1. momentum and Nesterov blend on this rank's shard: elementwise, float32, unscaled units, no traffic
2. matrices that lie whole on this rank are orthogonalized here, same shapes in one batch
3. the others travel to their owners, are orthogonalized there, and travel back as shards
4. decoupled weight decay, learning rate
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_core.errors import NotAttached, UnsupportedSetup
from muon_core.muon import (
    adamw_step_,
    apply_measured_update_,
    new_adamw_state,
    orthogonalize_directions_,
    validate_iteration_dtype,
    validate_settings,
)
from muon_core.newton_schulz import ITERATION_DTYPES, coefficient_schedule, default_iteration_dtype
from muon_core.parameters import MatrixShape, Routed, build_param_groups, full_shape, route_parameters
from muon_core.zero.clipping import CLIP_SCOPES, Clipping, ClipScope
from muon_core.zero.exchange import DEFAULT_BUCKET_ELEMENTS, Exchange, ExchangePlan, plan_exchange
from muon_core.zero.layout import (
    MOMENTUM_KEYS,
    MomentumView,
    Partition,
    ViewCache,
    ZeroPartitions,
    partitions_of,
    register_attachment,
)
from muon_core.zero.orderings import STEP_ORDERINGS, Group, Ordered, build_ordering
from muon_core.zero.precision import StepHooks


class ZeroMuon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, on ZeRO partitions; made by `build_optimizer`, bound by `attach`."""

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]],
        routed: Sequence[Routed],
        *,
        step_ordering: str = "ordered",
        clip_scope: ClipScope = "gradient",
        iteration_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        schedule_counts_discarded_steps: bool = False,
    ) -> None:
        if step_ordering not in STEP_ORDERINGS:
            raise ValueError(f"step_ordering={step_ordering!r} is unknown; choose one of {', '.join(STEP_ORDERINGS)}")
        if clip_scope not in CLIP_SCOPES:
            raise ValueError(f"clip_scope={clip_scope!r} is unknown; choose one of {', '.join(CLIP_SCOPES)}")
        if bucket_elements < 1:
            raise ValueError(f"bucket_elements={bucket_elements} must be at least 1")
        validate_iteration_dtype(iteration_dtype)
        if wire_dtype not in (None, *ITERATION_DTYPES):
            raise ValueError(f"wire_dtype={wire_dtype} is none of {', '.join(map(str, ITERATION_DTYPES))}")
        super().__init__([dict(group) for group in params], {})
        self.routed = list(routed)
        self.step_ordering = step_ordering
        self.clip_scope: ClipScope = clip_scope
        self.iteration_dtype = iteration_dtype
        self.default_dtype = torch.float32
        """What is iterated in where `iteration_dtype` is None; the same on every rank, by `attach`."""
        self.bucket_elements = bucket_elements
        self.schedule_counts_discarded_steps = schedule_counts_discarded_steps
        self.ns_calls = 0
        """Parameters orthogonalized on this rank so far."""
        self.last_update_norm_squared: Tensor | None = None
        """This rank's squared norm of the newest applied Muon update, before lr, on its device; None if none was."""
        self.stage = 0
        self.overflow_checks_added = 0
        """All-reduces of ours a step: 1 where DeepSpeed was told to run no overflow check, else 0."""
        self._wire_dtype = wire_dtype
        self._matrices = {
            id(parameter): matrices
            for group in self.param_groups
            for parameter, matrices in zip(group["params"], group.pop("matrices"), strict=True)
        }
        self._views = ViewCache()
        self._engine: Callable[[], Any] = lambda: None
        self._ordering: Ordered | None = None
        self._clipping: Clipping | None = None
        self._partitions: ZeroPartitions | None = None
        self._exchange: Exchange | None = None
        self._plans: dict[int, ExchangePlan] = {}

    @property
    def partitions(self) -> ZeroPartitions:
        if self._partitions is None:
            raise NotAttached(
                "ZeroMuon is not attached: either DeepSpeed stepped it inside initialize, as it does at ZeRO stage 0 "
                "and in its BF16_Optimizer (bf16, stage 1, fp32 gradient accumulation), or "
                "muon_core.attach(engine, optimizer) was not called",
                "use ZeRO stage 1, 2 or 3 and attach after deepspeed.initialize",
            )
        return self._partitions

    @property
    def ordering(self) -> Ordered:
        assert self._ordering is not None
        return self._ordering

    @property
    def clipping(self) -> Clipping:
        assert self._clipping is not None
        return self._clipping

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every partition whose gradient is set; called by DeepSpeed, once per partition."""
        partitions = self.partitions
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                if group["route"] == "muon":
                    self._muon_step(partitions.of_flat(flat), group, flat)
                else:
                    adamw_step_(flat, self.clipping.adamw_gradient(flat.grad), self.state[flat], group)
        return None

    def _muon_step(self, partition: Partition, group: Group, flat: Tensor) -> None:
        assert flat.grad is not None
        update = self.clipping.muon_update(partition, flat.grad)
        norm_squared = apply_measured_update_(flat, update, lr=group["lr"], weight_decay=group["weight_decay"])
        norm_squared = norm_squared.to(self.partitions.device)
        previous = self.last_update_norm_squared
        self.last_update_norm_squared = norm_squared if previous is None else previous + norm_squared

    def take_update(self, partition: Partition, gradient: Tensor) -> Tensor:
        return self.ordering.take_update(partition, gradient)

    def orthogonalize_shards_(self, partition: Partition, group: Group, shard: Tensor) -> None:
        """Turn a partition's shard of blended directions into its shard of updates; collective where any travels.

        Offloaded shards come to the accelerator for it: there the products are fast and the ranks can exchange.
        """
        if shard.device == self.partitions.device:
            self._orthogonalize_on_device_(partition, group, shard)
            return
        moved = shard.to(self.partitions.device)
        self._orthogonalize_on_device_(partition, group, moved)
        shard.copy_(moved)

    def _orthogonalize_on_device_(self, partition: Partition, group: Group, shard: Tensor) -> None:
        plan, rank, parameters = self._plans[partition.number], self.partitions.rank, partition.parameters
        exchange, chunks = self.exchange, plan.chunks
        # While a chunk is orthogonalized the next one comes and the one before goes back.
        arrive = exchange.to_owners(chunks[0], parameters, shard) if chunks else None
        here = []
        for position in plan.whole[rank]:
            fragment = parameters[position].fragments[rank]
            here.append((position, shard.narrow(0, fragment.offset, fragment.numel)))
        self._orthogonalize_(partition, group, here)
        finish_return: Callable[[], None] | None = None
        for number, chunk in enumerate(chunks):
            assert arrive is not None
            whole = arrive()
            if number + 1 < len(chunks):
                arrive = exchange.to_owners(chunks[number + 1], parameters, shard)
            self._orthogonalize_(partition, group, list(whole.items()))
            if finish_return is not None:
                finish_return()
            finish_return = exchange.from_owners(chunk, parameters, whole, shard)
        if finish_return is not None:
            finish_return()

    def _orthogonalize_(self, partition: Partition, group: Group, items: Sequence[tuple[int, Tensor]]) -> None:
        shapes = [_matrices_of(partition, position) for position, _ in items]
        orthogonalize_directions_(
            [direction for _, direction in items],
            shapes,
            ns_method=group["ns_method"],
            ns_steps=group["ns_steps"],
            iteration_dtype=self.iteration_dtype or self.default_dtype,
            max_elements=self.bucket_elements,
        )
        self.ns_calls += len(items)

    def group_of(self, partition: Partition) -> Group:
        return self.param_groups[partition.group_index]

    def momentum_of(self, partition: Partition) -> Tensor:
        return self.state[self.partitions.flat(partition)]["momentum_buffer"]

    def momentum_views(self) -> list[MomentumView]:
        partitions = self.partitions
        buffers = [self._momentum_buffer(partition) for partition in partitions.partitions]
        return self._views.views(buffers, lambda: self._make_views(buffers))

    def _momentum_buffer(self, partition: Partition) -> Tensor | None:
        key = MOMENTUM_KEYS[self.group_of(partition)["route"]]
        return self.state[self.partitions.flat(partition)].get(key)

    def _make_views(self, buffers: Sequence[Tensor | None]) -> list[MomentumView]:
        views = []
        for partition, buffer in zip(self.partitions.partitions, buffers, strict=True):
            for parameter in partition.parameters:
                fragment = parameter.fragments[self.partitions.rank]
                if buffer is not None and fragment.numel:
                    view = buffer.narrow(0, fragment.offset, fragment.numel)
                    views.append(MomentumView(parameter.index, view, self.group_of(partition)["route"]))
        return sorted(views, key=lambda view: view.parameter_index)

    def before_check(self) -> None:
        self.last_update_norm_squared = None
        self.clipping.before_check()
        with torch.no_grad():
            self.ordering.before_check()

    def survived(self) -> None:
        with torch.no_grad():
            self.clipping.survived()

    def after_step(self, overflow: bool) -> None:
        with torch.no_grad():
            self.ordering.after_step(overflow)
            self.partitions.forget_gradients()
        engine = self._engine()
        if overflow and self.schedule_counts_discarded_steps and engine.lr_scheduler is not None:
            # DeepSpeed's engine steps its schedule after an applied step, and only then.
            engine.lr_scheduler.step()

    def _require_own_engine(self, engine: Any) -> None:
        """Refuse what is no engine, a second attachment, and a model whose frozen parameters are not those routed."""
        if not isinstance(getattr(engine, "module", None), nn.Module) or not hasattr(engine, "optimizer"):
            raise UnsupportedSetup(
                f"attach was given a {type(engine).__name__}, which is no DeepSpeed engine",
                "give it the engine that deepspeed.initialize returns",
            )
        if self._partitions is not None:
            raise UnsupportedSetup(
                "this optimizer is attached already, and its hooks would run twice",
                "attach once, and build an optimizer for each engine",
            )
        for name, parameter in engine.module.named_parameters():
            is_routed = id(parameter) in self._matrices
            if is_routed != (parameter.requires_grad and math.prod(full_shape(parameter)) > 0):
                raise UnsupportedSetup(
                    f"{name} was {'frozen' if is_routed else 'unfrozen, or added,'} after build_optimizer routed it",
                    "set requires_grad before build_optimizer",
                )

    def bind(self, engine: Any) -> None:
        """Take over an engine's partitions; `attach` calls it on every rank."""
        self._require_own_engine(engine)
        partitions = partitions_of(engine, dict(self._matrices))
        stepped = engine.optimizer.optimizer
        if stepped is not self:
            raise UnsupportedSetup(
                f"the engine steps another optimizer ({type(stepped).__name__}), not the one to attach",
                "hand this one to deepspeed.initialize(optimizer=…)",
            )
        tagged = [name for name, parameter in engine.module.named_parameters() if getattr(parameter, "use_muon", False)]
        if tagged:
            raise UnsupportedSetup(
                f"{len(tagged)} parameters carry DeepSpeed's use_muon tag (first: {tagged[0]}), so DeepSpeed would run "
                "its own Muon on them too",
                "remove the tag; route with name patterns instead",
            )
        if self.step_ordering != "ordered" and not engine.managed_gradient_accumulation():
            raise UnsupportedSetup(
                f"step_ordering {self.step_ordering} must know a window's last micro-batch before it is reduced",
                "leave managed_gradient_accumulation on",
            )
        if self.step_ordering != "ordered" and partitions.is_offloaded:
            raise UnsupportedSetup(
                f"step_ordering {self.step_ordering} acts on gradients before the overflow check, where offload has "
                "already recorded its verdict",
                "use the ordering ordered, or remove offload_optimizer",
            )
        self._engine = weakref.ref(engine)
        self._partitions, self.stage = partitions, partitions.stage
        self.default_dtype = default_iteration_dtype(partitions.device)
        wire_dtype = self._wire_dtype or engine._config.communication_data_type or torch.float32
        self._exchange = Exchange(partitions.process_group, wire_dtype)
        for partition in partitions.partitions:
            flat, group = partitions.flat(partition), self.group_of(partition)
            if group["route"] == "muon":
                self._plans[partition.number] = plan_exchange(
                    partition.parameters, partitions.world_size, self.bucket_elements
                )
                self.state[flat] = {"momentum_buffer": torch.zeros_like(flat, requires_grad=False)}
            else:
                self.state[flat] = new_adamw_state(flat.detach())
        zero = engine.optimizer
        if partitions.stage < 3 and not zero.check_grad_overflow:
            # DeepSpeed looks at the norm instead, except in bf16 or where it computes none: run its check after all.
            looks_at_norm = zero.compute_grad_norm and zero.dtype != torch.bfloat16
            zero.check_grad_overflow = not looks_at_norm
            self.overflow_checks_added = int(not looks_at_norm)
        self._ordering = build_ordering(self.step_ordering, self)
        self._clipping = Clipping(self, self.clip_scope, float(zero.clip_grad))
        StepHooks(zero, self, hold_scale=True)


def build_optimizer(
    model: nn.Module,
    *,
    lr: float = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    ns_method: str = "gram",
    ns_steps: int = 5,
    adam: Mapping[str, Any] | None = None,
    step_ordering: str = "ordered",
    clip_scope: ClipScope = "gradient",
    muon_patterns: Sequence[str] = (),
    adamw_patterns: Sequence[str] = (),
    iteration_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
    schedule_counts_discarded_steps: bool = False,
) -> ZeroMuon:
    """Build the optimizer to hand to `deepspeed.initialize(model=model, optimizer=…)`; then call `attach`.

    DeepSpeed's config must say `"zero_allow_untested_optimizer": true`, and should say `"gradient_clipping"`: its
    default is 1.0, not off. With `offload_optimizer` it must also say `"zero_force_ds_cpu_optimizer": false`.

    Args:
        model: on every rank the same.
        lr, momentum, weight_decay, nesterov, ns_method, ns_steps: Muon's, see `muon_core.Muon`.
        adam: AdamW's `lr`, `betas`, `eps`, `weight_decay`; what is missing is Muon's lr and weight decay, and torch's
            betas and eps.
        step_ordering: when the momentum moves; all but `ordered` exist to be compared with it.
        clip_scope: what `gradient_clipping` measures and scales: `gradient` (all gradients, as for any optimizer),
            `update` (Muon's updates with AdamW's gradients, as DeepSpeed's own Muon) or `muon_exempt` (AdamW's
            gradients alone).
        muon_patterns, adamw_patterns: name patterns that override the routing rules.
        iteration_dtype: of Newton-Schulz; None chooses by device.
        wire_dtype: of matrices that travel between ranks; None takes the config's `communication_data_type` if it
            sets one, else float32, which keeps all stages equal bit for bit.
        bucket_elements: bounds a chunk of travelling matrices and a batch of orthogonalized ones.
        schedule_counts_discarded_steps: on, a schedule of DeepSpeed's engine advances with every step that was tried;
            off, with applied steps alone.
    Raises:
        ValueError: a setting out of range, or nothing to train.
    """
    muon: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    muon |= {"ns_method": ns_method, "ns_steps": ns_steps}
    routed = route_parameters(model, muon=muon_patterns, adamw=adamw_patterns)
    return ZeroMuon(
        build_param_groups(model, routed, _checked_muon(muon), _checked_adam(adam or {}, muon)),
        routed,
        step_ordering=step_ordering,
        clip_scope=clip_scope,
        iteration_dtype=iteration_dtype,
        wire_dtype=wire_dtype,
        bucket_elements=bucket_elements,
        schedule_counts_discarded_steps=schedule_counts_discarded_steps,
    )


def _checked_muon(settings: dict[str, Any]) -> dict[str, Any]:
    validate_settings(**{name: settings[name] for name in ("lr", "momentum", "weight_decay")})
    coefficient_schedule(settings["ns_method"], settings["ns_steps"])
    return settings


def _checked_adam(asked: Mapping[str, Any], muon: Mapping[str, Any]) -> dict[str, Any]:
    """Complete AdamW's settings with Muon's."""
    settings = {"lr": muon["lr"], "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": muon["weight_decay"], **asked}
    unknown = set(settings) - {"lr", "betas", "eps", "weight_decay"}
    if unknown:
        raise ValueError(f"adam has unknown settings {sorted(unknown)}; lr, betas, eps and weight_decay are known")
    validate_settings(momentum=muon["momentum"], **settings)
    return settings


def attach(engine: Any, optimizer: ZeroMuon) -> None:
    """Bind the optimizer to its engine's ZeRO partitions, right after `deepspeed.initialize`.

    Collective: every rank must call it. If any rank refuses, all do.

    Raises:
        UnsupportedSetup: an engine whose partitions or checks are not what the step needs; nothing has been trained.
    """
    if not dist.is_initialized():
        raise UnsupportedSetup("there is no process group", "call attach after deepspeed.initialize, which makes one")
    refusal: Exception | None = None
    digest = ""
    try:
        optimizer.bind(engine)
        digest = optimizer.partitions.digest()
    except Exception as error:  # Whatever it is: the other ranks wait for this one's answer.
        refusal = error
    said: list[tuple[str, str, str, torch.dtype] | None] = [None] * dist.get_world_size()
    dtype = optimizer.default_dtype
    if isinstance(refusal, UnsupportedSetup):
        mine = ("", refusal.reason, refusal.remedy, dtype)
    elif refusal is not None:
        mine = ("", f"{type(refusal).__name__}: {refusal}", "see what that rank raised", dtype)
    else:
        mine = (digest, "", "", dtype)
    dist.all_gather_object(said, mine)
    for rank, answer in enumerate(said):
        assert answer is not None
        if answer[1]:
            raise refusal or UnsupportedSetup(f"rank {rank}: {answer[1]}", answer[2])
    if len({answer[0] for answer in said if answer is not None}) != 1:
        raise UnsupportedSetup("the ranks do not hold the same parameters", "build the same model on every rank")
    if len({answer[3] for answer in said if answer is not None}) != 1:
        # Processors of different kinds: which rank orthogonalizes a matrix must not decide in which dtype.
        optimizer.default_dtype = torch.float32
    register_attachment(engine, optimizer)


def _matrices_of(partition: Partition, position: int) -> MatrixShape:
    matrices = partition.parameters[position].matrices
    assert matrices is not None
    return matrices
