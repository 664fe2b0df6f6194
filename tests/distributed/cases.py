"""The runs that distributed tests compare; each trains for real on every rank and returns plain data.

One `train` covers the matrix of stage, precision, accumulation, clipping, loss scale, ordering and planted overflows.
What differs from it (plain torch, the published cases) has a case of its own.
"""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import muon_core
from muon_core.errors import NotAttached, UnsupportedSetup
from muon_core.zero import deepspeed_native
from muon_core.zero.layout import attachment_of, momentum_views
from muon_core.zero.precision import LossScaleExhausted, StepOutcome, engine_step
from tests.distributed.scenario import (
    DTYPES,
    CalmBoom,
    SimpleModel,
    Stack,
    digest,
    ds_config,
    full_momentum,
    full_momentum_and_weights,
    full_weights,
    local_momentum_digest,
    muon_engine,
    take_down,
)

WIDTHS = (24, 40, 24, 17)
# (step, micro-batch, rank or None for all): where an input is multiplied until its gradient overflows.
Plant = tuple[int, int, int | None]


def samples(widths: Sequence[int], step: int, rank: int, micro_batch: int, count: int) -> tuple[Tensor, Tensor]:
    """The same numbers for the same place in training, whatever the world size or accumulation."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro_batch)
    return (
        torch.randn(count, widths[0], generator=generator),
        torch.randn(count, widths[-1], generator=generator),
    )


def train(
    *,
    stage: int,
    ordering: str = "ordered",
    precision: str = "fp16",
    steps: int = 8,
    gas: int = 1,
    micro_batch: int = 4,
    clip: float = 0.0,
    power: int = 10,
    fp16: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    plants: Sequence[Plant] = (),
    plant: float = 6e4,
    widths: Sequence[int] = WIDTHS,
    split_batch: bool = False,
    read_views: bool = False,
    settings: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    keep_weights: bool = False,
    loss_factor: float = 1.0,
) -> dict[str, Any]:
    """Train a stack of linears and say everything about every step."""
    torch.manual_seed(0)
    rank, rows, died = dist.get_rank(), [], None
    config = ds_config(
        stage=stage,
        precision=precision,
        gas=gas,
        micro_batch=micro_batch,
        clip=clip,
        fp16=fp16 or {"initial_scale_power": power},
        zero=zero,
        **(extra or {}),
    )
    with muon_engine(
        Stack(tuple(widths)),
        config,
        step_ordering=ordering,
        **{"lr": 0.05, "adam": {"lr": 1e-3}, "iteration_dtype": torch.float32, **(settings or {})},
    ) as (engine, optimizer):
        initial = digest(full_weights(engine))
        after = local_momentum_digest(engine)
        for step in range(steps):
            before = after
            try:
                outcome = _one_step(
                    engine,
                    step,
                    gas,
                    micro_batch,
                    precision,
                    plants,
                    plant,
                    widths,
                    split_batch,
                    read_views,
                    loss_factor,
                )
            except LossScaleExhausted as error:
                died = (step, error.loss_scale)
                break
            after = local_momentum_digest(engine)
            rows.append(_row(engine, outcome, before, after))
        weights = full_weights(engine)
        return {
            "rank": rank,
            "died": died,
            "rows": rows,
            "initial": initial,
            "weights": [weight.tolist() for weight in weights] if keep_weights else None,
            "finite": all(torch.isfinite(weight).all().item() for weight in weights),
            "elements_sent": optimizer.exchange.elements_sent,
            "exchange_collectives": optimizer.exchange.num_collectives,
            "all_reduces": optimizer.ordering.num_all_reduces,
            "staged_bytes": optimizer.ordering.staged_bytes,
            "clip_all_reduces": optimizer.clipping.num_all_reduces,
            "checks_added": optimizer.overflow_checks_added,
            "ns_calls": optimizer.ns_calls,
        }


def _one_step(
    engine: Any,
    step: int,
    gas: int,
    micro_batch: int,
    precision: str,
    plants: Sequence[Plant],
    plant: float,
    widths: Sequence[int],
    split_batch: bool,
    read_views: bool,
    loss_factor: float,
) -> StepOutcome:
    rank = dist.get_rank()
    for position in range(gas):
        if split_batch:
            x, y = (whole.chunk(gas)[position] for whole in samples(widths, step, rank, 0, micro_batch * gas))
        else:
            x, y = samples(widths, step, rank, position, micro_batch)
        if any(at == (step, position) and who in (None, rank) for *at_list, who in plants for at in [tuple(at_list)]):
            x = x * plant
        x, y = x.to(engine.device, DTYPES[precision]), y.to(engine.device)
        engine.backward(functional.mse_loss(engine(x).float(), y) * loss_factor)
        if read_views:
            sum(view.view.double().norm().item() for view in momentum_views(engine))
        outcome = engine_step(engine)
    return outcome


def _row(engine: Any, outcome: StepOutcome, before: tuple[int, str], after: tuple[int, str]) -> dict[str, Any]:
    momentum, weights = full_momentum_and_weights(engine)
    norm_squared = attachment_of(engine).last_update_norm_squared
    total = torch.zeros(1, device=engine.device) if norm_squared is None else norm_squared.clone().view(1)
    dist.all_reduce(total)
    return {
        "overflow": outcome.overflow,
        "discarded": outcome.discarded,
        "scale": (outcome.loss_scale_before, outcome.loss_scale_after),
        "grad_norm": outcome.grad_norm,
        "clip_norm": None if (norm := attachment_of(engine).clipping.last_norm) is None else norm.item(),
        "lr": outcome.lr,
        "ns_calls": outcome.ns_calls,
        "update_norm": None if norm_squared is None else total.item() ** 0.5,
        "momentum": digest(momentum),
        "momentum_by_parameter": {index: digest([tensor]) for index, tensor in momentum.items()},
        "momentum_finite": {index: bool(torch.isfinite(tensor).all()) for index, tensor in momentum.items()},
        "weights": digest(weights),
        "buffers_compared": before[0],
        "local_momentum_held": before == after,
    }


def train_in_plain_torch(
    *,
    world_size: int,
    steps: int,
    micro_batch: int,
    clip: float = 0.0,
    clip_scope: str = "gradient",
    settings: dict[str, Any] | None = None,
) -> list[list[float]]:
    """One process, the full batch, `muon_core.Muon`, fp32: what every sharded run must amount to."""
    torch.manual_seed(0)
    model = Stack(WIDTHS)
    muon_settings = {"lr": 0.05, "momentum": 0.95, "weight_decay": 0.0, **(settings or {})}
    adamw_settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": muon_settings["weight_decay"]}
    groups = muon_core.parameters.build_param_groups(
        model, muon_core.route_parameters(model), muon_settings, adamw_settings
    )
    optimizer = muon_core.Muon(groups)
    for step in range(steps):
        batches = [samples(WIDTHS, step, rank, 0, micro_batch) for rank in range(world_size)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        functional.mse_loss(model(x), y).backward()
        if clip and clip_scope == "muon_exempt":
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim < 2], clip)
        elif clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().tolist() for parameter in model.parameters()]


def gradient_accumulation(*, stage: int, gas: int, steps: int, implementation: str, ordering: str) -> dict[str, Any]:
    """Two 64 x 64 matrices, fp32: the published case of Newton-Schulz calls and of one batch against four."""
    torch.manual_seed(0)
    width, per_rank = 64, 8
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(2)])
    config = ds_config(stage=stage, precision="fp32", gas=gas, micro_batch=per_rank // gas)
    engine = build_engine(model, config, implementation, ordering, lr=0.02, momentum=0.95)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    counts = torch.zeros(steps, dtype=torch.int64, device=engine.device)
    for step in range(steps):
        x, y = (torch.randn(per_rank, width, generator=generator).to(engine.device) for _ in range(2))
        for x_part, y_part in zip(x.chunk(gas), y.chunk(gas), strict=True):
            engine.backward(functional.mse_loss(engine(x_part), y_part))
            outcome = engine_step(engine)
        counts[step] = outcome.ns_calls
    dist.all_reduce(counts)
    calls = torch.tensor([attachment_of(engine).ns_calls], device=engine.device)
    dist.all_reduce(calls)
    weights = [weight.tolist() for weight in full_weights(engine)]
    take_down(engine)
    return {"ns_calls": calls.item(), "ns_calls_by_step": counts.tolist(), "weights": weights}


def thirty_steps(
    *, stage: int, power: int, ordering: str, implementation: str, clip: float, steps: int = 30
) -> dict[str, Any]:
    """The 30-step table's run, measured after initialisation in the same dtype."""
    torch.manual_seed(0)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    config = ds_config(stage=stage, micro_batch=8 // world_size, clip=clip, fp16={"initial_scale_power": power})
    engine = build_engine(SimpleModel(), config, implementation, ordering, lr=0.05, momentum=0.95)
    before = full_weights(engine)
    generator, outcomes, died = torch.Generator().manual_seed(100 + rank), [], None
    for step in range(steps):
        x = torch.randn(8 // world_size, 128, generator=generator).half()
        y = torch.randint(0, 128, (8 // world_size,), generator=generator)
        engine.backward(engine(x.to(engine.device), y.to(engine.device)))
        try:
            outcomes.append(engine_step(engine))
        except LossScaleExhausted:
            died = step
            break
    motions = [(new - old).norm().item() for new, old in zip(full_weights(engine), before, strict=True)]
    views = momentum_views(engine)
    result = {
        "moved": sum(motion > 0 for motion in motions),
        "of": len(motions),
        "muon_motion": max(motions[::2]),
        "momentum_finite": all(torch.isfinite(view.view).all().item() for view in views if view.kind == "muon"),
        "buffers": sum(view.kind == "muon" for view in views),
        "died": died,
        "overflows": sum(outcome.overflow for outcome in outcomes),
        "steps": len(outcomes),
        "scale": float(engine.optimizer.loss_scale),
    }
    take_down(engine)
    return result


def calm_boom(
    *, stage: int, ordering: str, implementation: str, calm: list[float], boom: list[float], steps: int = 4
) -> list[dict[str, Any]]:
    """Two matrices, of which boom overflows at step 1; momentum norms before, after backward and after the step."""
    torch.manual_seed(0)
    config = ds_config(stage=stage, micro_batch=1, fp16={"initial_scale_power": 4})
    if implementation == "deepspeed":
        config["gradient_clipping"] = 1.0
    engine = build_engine(CalmBoom(), config, implementation, ordering, lr=0.01, momentum=0.9)
    calm_input, boom_input = (torch.tensor(x).half().view(1, -1).to(engine.device) for x in (calm, boom))
    rows = []
    for step in range(steps):
        overflowing = torch.full_like(boom_input, 6e4)
        before, weights = _momentum_copies(engine), full_weights(engine)
        counter = _AllReduceCounter()
        with counter:
            engine.backward(engine(calm_input, overflowing if step == 1 else boom_input))
            after_backward = _momentum_copies(engine)
            outcome = engine_step(engine)
        after = _momentum_copies(engine)
        rows.append(
            {
                "overflow": outcome.overflow,
                "scale": outcome.loss_scale_before,
                "scale_after": outcome.loss_scale_after,
                "before": _norms(before),
                "after_backward": _norms(after_backward),
                "after": _norms(after),
                "bit_equal": [torch.equal(a, b) for a, b in zip(before, after, strict=True)] if before else None,
                "bits": digest(after),
                "moved": digest(weights) != digest(full_weights(engine)),
                "all_reduces": counter.count,
                "momentum_bytes": _momentum_bytes(engine),
            }
        )
    take_down(engine)
    return rows


def _momentum_bytes(engine: Any) -> int:
    """What this rank holds of Muon's momentum, copies that a step stages included; counted, each memory once."""
    attachment = attachment_of(engine)
    held = [
        state["momentum_buffer"] for state in engine.optimizer.optimizer.state.values() if "momentum_buffer" in state
    ]
    held += [entry[0] for entry in getattr(engine.optimizer, "_muon_pending_momentum", {}).values() if entry]
    by_memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(by_memory.values()) + getattr(getattr(attachment, "ordering", None), "staged_bytes", 0)


class _AllReduceCounter:
    """Counts the all-reduces that torch.distributed runs inside it, whoever asks for them."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self._original = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._original(*args, **kwargs)

        dist.all_reduce = counted
        torch.distributed.all_reduce = counted

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._original
        torch.distributed.all_reduce = self._original


def _momentum_copies(engine: Any) -> list[Tensor]:
    return [view.view.detach().cpu().clone() for view in momentum_views(engine) if view.kind == "muon"]


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    return [tensor.float().norm().item() for tensor in tensors]


def build_engine(
    model: torch.nn.Module,
    config: dict[str, Any],
    implementation: str,
    ordering: str,
    *,
    lr: float,
    momentum: float,
    **settings: Any,
) -> Any:
    """Either implementation, with the same settings; those of `settings` are known to ours alone."""
    if implementation == "muon_core":
        optimizer = muon_core.build_optimizer(
            model, lr=lr, momentum=momentum, step_ordering=ordering, iteration_dtype=torch.float32, **settings
        )
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        muon_core.attach(engine, optimizer)
        return engine
    config["optimizer"] = {
        "type": "Muon",
        "params": {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": 0.0,
            "torch_adam": True,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
        },
    }
    config["zero_optimization"]["reduce_scatter"] = False
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    deepspeed_native.install(engine, ordering)
    return engine


def refusal(
    *, config: dict[str, Any], tag: bool = False, implementation: str = "muon_core", ordering: str = "ordered"
) -> str:
    """Say why a set-up is refused; fails if it is not."""
    model = Stack(WIDTHS)
    if tag:
        model.layers[0].weight.use_muon = True  # type: ignore[assignment]
    try:
        if implementation == "muon_core":
            optimizer = muon_core.build_optimizer(model, step_ordering=ordering)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            muon_core.attach(engine, optimizer)
        else:
            build_engine(model, config, implementation, "master", lr=0.05, momentum=0.95)
    except (UnsupportedSetup, NotAttached) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the set-up was accepted")


def resume(*, stage: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Train on after a checkpoint that follows a discarded step, and again from that checkpoint in a fresh engine."""
    ends = []
    for is_resumed in (False, True):
        torch.manual_seed(7 if is_resumed else 0)
        config = ds_config(stage=stage, fp16={"initial_scale_power": 10, "hysteresis": 1})
        with muon_engine(Stack(WIDTHS), config, lr=0.05, adam={"lr": 1e-3}) as (engine, _):
            if is_resumed:
                engine.load_checkpoint(folder)
            else:
                for step in range(4):
                    _plain_step(engine, step, plants=[(3, 0, None)])
                engine.save_checkpoint(folder)
            at_checkpoint = (digest(full_momentum(engine)), digest(full_weights(engine)))
            for step in range(4, 7):
                _plain_step(engine, step, plants=[(5, 0, 1)])
            scale = float(engine.optimizer.loss_scale)
            ends.append([at_checkpoint, (digest(full_momentum(engine)), digest(full_weights(engine))), scale])
    return ends[0], ends[1]


def _plain_step(engine: Any, step: int, plants: Sequence[Plant] = ()) -> StepOutcome:
    return _one_step(engine, step, 1, 4, "fp16", plants, 6e4, WIDTHS, False, False, 1.0)


def views(*, stage: int, implementation: str, precision: str = "fp16") -> dict[str, Any]:
    """What the momentum views say, against the optimizer's own state; and that reading them changes nothing."""
    torch.manual_seed(0)
    ordering = "ordered" if implementation == "muon_core" else "deferred"
    config = ds_config(stage=stage, precision=precision, fp16={"initial_scale_power": 10})
    engine = build_engine(Stack(WIDTHS), config, implementation, ordering, lr=0.05, momentum=0.95)
    for step in range(3):
        _one_step(engine, step, 1, 4, precision, (), 1.0, WIDTHS, False, True, 1.0)
    first, second = momentum_views(engine), momentum_views(engine)
    state = engine.optimizer.optimizer.state
    storages = {
        tensor.untyped_storage().data_ptr()
        for each in state.values()
        for tensor in each.values()
        if torch.is_tensor(tensor)
    }
    result: dict[str, Any] = {
        "by_parameter": [(view.parameter_index, view.view.numel(), view.kind) for view in first],
        "cached": all(a.view is b.view for a, b in zip(first, second, strict=True)),
        "live": all(view.view.untyped_storage().data_ptr() in storages for view in first),
        "one_dimensional": all(view.view.ndim == 1 for view in first),
    }
    for each in state.values():
        for key in ("momentum_buffer", "exp_avg"):
            if key in each:
                each[key] = torch.full_like(each[key], 3.0)
    result["follows_new_buffers"] = all((view.view == 3.0).all().item() for view in momentum_views(engine))
    take_down(engine)
    return result


def half_trained_bits(*, stage: int, read_views: bool) -> str:
    run = train(stage=stage, steps=4, read_views=read_views)
    return str(run["rows"][-1]["weights"])


def unseen_engine() -> str:
    """Ask for the momentum of an engine that nobody attached."""
    model = Stack(WIDTHS)
    optimizer = muon_core.build_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage=1))
    messages = []
    for ask in (momentum_views, engine_step):
        try:
            ask(engine)
        except NotAttached as error:
            messages.append(str(error))
    take_down(engine)
    return " | ".join(messages)


def ranks_that_disagree() -> str:
    """Route one matrix elsewhere on rank 1: DeepSpeed notices nothing, and would add up unlike elements."""
    model = Stack(WIDTHS)
    patterns = ("layers.1.weight",) if dist.get_rank() == 1 else ()
    optimizer = muon_core.build_optimizer(model, adamw_patterns=patterns)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage=1))
        muon_core.attach(engine, optimizer)
    except UnsupportedSetup as error:
        return str(error)
    raise AssertionError("the ranks were accepted")
