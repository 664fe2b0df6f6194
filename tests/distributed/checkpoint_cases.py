"""Runs that stop on one set-up and go on in another, on the same global batches."""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from muon_core import attach, build_optimizer, load_consolidated, save_consolidated
from muon_core.errors import CheckpointMismatch
from muon_core.zero.layout import attachment_of
from muon_core.zero.precision import engine_step
from tests.distributed.scenario import (
    DTYPES,
    Stack,
    digest,
    ds_config,
    full_state,
    full_weights,
    muon_engine,
    take_down,
)

GLOBAL_BATCH = 8
WIDTHS = (24, 40, 17)


class Furnished(nn.Module):
    """A stack with what besides trained weights makes up a model: a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(WIDTHS)
        self.shift = nn.Parameter(torch.randn(24), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x + self.shift.to(x.dtype))


def save(
    *,
    stage: int,
    folder: str,
    precision: str = "fp32",
    steps: int = 4,
    more: int = 3,
    file_bytes: int = 1 << 31,
    **options: Any,
) -> dict[str, Any]:
    """Train, write a checkpoint, and train on: what a resumed run is held against."""
    with _engine(stage, precision, seed=0, **options) as (engine, optimizer):
        for step in range(steps):
            _step(engine, step, precision, is_planted=precision == "fp16" and step == steps - 1)
        engine.module.seen.fill_(5.0)
        save_consolidated(engine, optimizer, folder, client_state={"step": steps}, file_bytes=file_bytes)
        at_checkpoint = _everything(engine)
        for step in range(steps, steps + more):
            _step(engine, step, precision)
        return {"at_checkpoint": at_checkpoint, "end": _everything(engine), "weights": _lists(engine)}


def resume(
    *, stage: int, folder: str, precision: str = "fp32", steps: int = 4, more: int = 3, **options: Any
) -> dict[str, Any]:
    """Load into a model of other numbers, and train on."""
    with _engine(stage, precision, seed=99, **options) as (engine, optimizer):
        untouched = _everything(engine)
        client_state = load_consolidated(engine, optimizer, folder)
        loaded = _everything(engine)
        shown = {p.dtype for p in engine.module.parameters() if p.requires_grad}
        for step in range(steps, steps + more):
            _step(engine, step, precision)
        return {
            "untouched": untouched,
            "at_checkpoint": loaded,
            "end": _everything(engine),
            "weights": _lists(engine),
            "client_state": client_state,
            "dtypes": [str(dtype) for dtype in shown],
        }


def refused_resume(*, stage: int, folder: str, pattern: str) -> tuple[str, bool]:
    """Try to load what another routing wrote; say the reason, and whether anything was changed."""
    with _engine(stage, "fp32", seed=99, adamw_patterns=(pattern,)) as (engine, optimizer):
        return _refusal(engine, optimizer, folder)


def refused_another_buffer(*, stage: int, folder: str, shape: tuple[int, ...] | None) -> tuple[str, bool]:
    """Try to load into a model with another buffer, or one more; say the reason, and whether anything was changed."""
    with _engine(stage, "fp32", seed=99) as (engine, optimizer):
        if shape is None:
            engine.module.register_buffer("more", torch.zeros(2))
        else:
            engine.module.seen = torch.zeros(shape)
        return _refusal(engine, optimizer, folder)


def refused_on_one_rank(*, stage: int, folder: str) -> tuple[str, bool]:
    """Try to load what the second rank cannot see."""
    with _engine(stage, "fp32", seed=99) as (engine, optimizer):
        return _refusal(engine, optimizer, folder if dist.get_rank() == 0 else folder + "-elsewhere")


def refused_as_it_is(*, stage: int, folder: str) -> tuple[str, bool]:
    """Try to load into the very model that wrote it."""
    with _engine(stage, "fp32", seed=99) as (engine, optimizer):
        return _refusal(engine, optimizer, folder)


def _refusal(engine: Any, optimizer: Any, folder: str) -> tuple[str, bool]:
    before = _everything(engine)
    try:
        load_consolidated(engine, optimizer, folder)
    except CheckpointMismatch as error:
        return str(error), _everything(engine) == before
    raise AssertionError("the checkpoint was accepted")


def thawed(*, stage: int, folder: str) -> dict[str, bool]:
    """Unfreeze one parameter and freeze another in mid-training, save, and say what stands under which name."""
    torch.manual_seed(0)
    model = Stack((12, 12, 12, 12))
    model.layers[0].weight.requires_grad_(False)
    with muon_engine(model, ds_config(stage=stage, precision="fp32"), adam={"lr": 1e-3}) as (engine, optimizer):
        engine.backward(engine(torch.ones(2, 12, device=engine.device)).square().mean())
        engine_step(engine)
        model.layers[0].weight.requires_grad_(True)
        model.layers[2].bias.requires_grad_(False)
        save_consolidated(engine, optimizer, folder)
        trained = ["layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"]
        written = load_file(f"{folder}/tensors-00001.safetensors")
        read = {
            name: torch.equal(written[f"master/{name}"].view(-1), weight.cpu())
            for name, weight in zip(trained, full_weights(engine), strict=True)
        }
        return {**read, "frozen": [key for key in written if key.startswith("frozen/")] == ["frozen/layers.0.weight"]}


def refused_save(*, folder: str) -> list[str]:
    """Try to save over what stands there, and inside an accumulation window; and to load there."""
    messages = []
    Path(folder).mkdir(exist_ok=True)
    with _engine(1, "fp32", seed=0, gas=2) as (engine, optimizer):
        for is_inside in (False, True):
            if is_inside:
                engine.backward(engine(torch.ones(2, 24).to(engine.device)).sum())
                engine_step(engine)
            try:
                save_consolidated(engine, optimizer, folder)
            except ValueError as error:
                messages.append(str(error))
        before = _everything(engine)
        try:
            load_consolidated(engine, optimizer, folder)
        except ValueError as error:
            messages.append(str(error))
        assert _everything(engine) == before
    return messages


def refused_by_the_first_rank(*, folder: str | None) -> str:
    """Try to save where the first rank alone has something wrong: a state that is not JSON, or a nameless folder."""
    with _engine(1, "fp32", seed=0) as (engine, optimizer):
        state = {"seen": {1, 2}} if folder is not None and dist.get_rank() == 0 else {}
        try:
            save_consolidated(engine, optimizer, folder or ".", client_state=state)
        except ValueError as error:
            return str(error)
    return "saved"


def order_of_keeping(*, folder: str) -> list[str]:
    """Save, and say in which order files and folders were brought to the disk, and the folder to its name."""
    told: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        told.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def watched_rename(source: Any, target: Any) -> None:
        rename(source, target)
        told.append(f"renamed to {Path(target).name}")

    with _engine(1, "fp32", seed=0) as (engine, optimizer):
        os.fsync, os.rename = watched_fsync, watched_rename  # type: ignore[assignment]
        try:
            save_consolidated(engine, optimizer, folder, file_bytes=4000)
        finally:
            os.fsync, os.rename = fsync, rename
    return told


def learning_rates(*, folder: str, is_resumed: bool, steps: int = 2, more: int = 3) -> list[float]:
    """Train under a schedule of torch's whose state is not JSON's own types; save midway, or resume from there."""
    torch.manual_seed(0)
    model = Stack((6, 6))
    optimizer = build_optimizer(model, lr=0.1, adam={"lr": 1e-3})
    schedules = [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [2])
    config = ds_config(stage=1, precision="fp32")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    rates = []
    try:
        attach(engine, optimizer)
        if is_resumed:
            load_consolidated(engine, optimizer, folder)
        for step in range(steps if is_resumed else 0, steps + more):
            engine.backward(engine(torch.ones(2, 6, device=engine.device)).square().mean())
            rates.append(engine_step(engine).lr)
            if step + 1 == steps:
                save_consolidated(engine, optimizer, folder)
    finally:
        take_down(engine)
    return rates


def _engine(stage: int, precision: str, *, seed: int, gas: int = 1, **settings: Any) -> Any:
    torch.manual_seed(seed)
    zero = settings.pop("zero", None)
    config = ds_config(
        stage=stage,
        precision=precision,
        gas=gas,
        micro_batch=GLOBAL_BATCH // dist.get_world_size(),
        fp16={"initial_scale_power": 12, "hysteresis": 2, "loss_scale_window": 3},
        zero=zero,
        zero_force_ds_cpu_optimizer=False,
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 6, "warmup_type": "linear"},
        },
    )
    return muon_engine(Furnished(), config, lr=0.05, adam={"lr": 1e-3}, iteration_dtype=torch.float32, **settings)


def _step(engine: Any, step: int, precision: str, *, is_planted: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.randn(GLOBAL_BATCH, width, generator=generator).chunk(world_size)[rank] for width in (24, 17))
    x = (x * 6e4 if is_planted else x).to(engine.device, DTYPES[precision])
    engine.backward(functional.mse_loss(engine(x).float(), y.to(engine.device)))
    assert engine_step(engine).discarded == is_planted


def _everything(engine: Any) -> dict[str, Any]:
    """All that training goes on from, as digests and numbers."""
    optimizer, zero = attachment_of(engine), engine.optimizer
    partitions = optimizer.partitions
    steps = {
        float(optimizer.state[partitions.flat(partition)]["step"])
        for partition in partitions.partitions
        if optimizer.group_of(partition)["route"] == "adamw"
    }
    scaler = {name: getattr(zero.loss_scaler, name, None) for name in ("cur_scale", "cur_iter", "cur_hysteresis")}
    return {
        "weights": digest(full_weights(engine)),
        **{key: digest(full_state(engine, key)) for key in ("momentum_buffer", "exp_avg", "exp_avg_sq")},
        "adam_steps": sorted(steps),
        "scaler": scaler,
        "counts": (engine.global_steps, engine.skipped_steps),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "schedule": engine.lr_scheduler.state_dict(),
        "buffer": engine.module.seen.tolist(),
    }


def _lists(engine: Any) -> list[list[float]]:
    return [weight.tolist() for weight in full_weights(engine)]
