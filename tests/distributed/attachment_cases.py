"""Engines attached in a way that would train something else, and what is then said on every rank."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import muon_core
from muon_core import processor
from muon_core.errors import UnsupportedSetup
from muon_core.zero.precision import engine_step
from tests.distributed.cases import WIDTHS
from tests.distributed.scenario import Stack, ds_config, full_momentum, muon_engine, take_down


def misuse(*, kind: str) -> str:
    """Say why an attachment is refused; fails if it is not."""
    torch.manual_seed(0)
    model = Stack(WIDTHS)
    if kind == "unfrozen":
        model.layers[1].weight.requires_grad_(False)
    optimizer = muon_core.build_optimizer(model)
    if kind in ("frozen", "unfrozen"):
        model.layers[1].weight.requires_grad_(kind == "unfrozen")
    stepped = torch.optim.SGD(model.parameters(), lr=0.1) if kind == "another optimizer" else optimizer
    engine, *_ = deepspeed.initialize(model=model, optimizer=stepped, config=ds_config(stage=2))
    if kind == "one rank fails" and dist.get_rank() == 1:
        optimizer.bind = _fail  # type: ignore[method-assign]
    try:
        muon_core.attach(model if kind == "no engine" else engine, optimizer)
    except (UnsupportedSetup, OSError) as error:
        return str(error)
    finally:
        take_down(engine)
    raise AssertionError("the attachment was accepted")


def iterated_in(*, native_ranks: tuple[int, ...]) -> dict[str, Any]:
    """Attach where only some ranks' processors multiply bfloat16 natively; say what is iterated in, and the weights."""
    kept = processor._choice
    processor._choice = torch.bfloat16 if dist.get_rank() in native_ranks else torch.float32
    torch.manual_seed(0)
    try:
        config = ds_config(stage=1, fp16={"initial_scale_power": 8, "loss_scale_window": 2})
        with muon_engine(Stack(WIDTHS), config) as (engine, optimizer):
            _step(engine)
            weights = torch.cat([parameter.detach().float().flatten() for parameter in engine.module.parameters()])
            return {"dtype": str(optimizer.default_dtype), "weights": weights.cpu()}
    finally:
        processor._choice = kept


def attached_twice(*, stage: int) -> dict[str, Any]:
    """Attach a second time after a step, and train on."""
    torch.manual_seed(0)
    config = ds_config(stage=stage, fp16={"initial_scale_power": 8, "loss_scale_window": 2})
    with muon_engine(Stack(WIDTHS), config) as (engine, optimizer):
        scales = [_step(engine)]
        before, message = full_momentum(engine), ""
        try:
            muon_core.attach(engine, optimizer)
        except UnsupportedSetup as error:
            message = str(error)
        after = full_momentum(engine)
        scales += [_step(engine) for _ in range(4)]
        is_kept = all(torch.equal(before[index], after[index]) for index in before)
        return {"message": message, "momentum_kept": is_kept, "compared": len(before), "scales": scales}


def _step(engine: Any) -> float:
    engine.backward(engine(torch.ones(2, WIDTHS[0], device=engine.device).half()).float().square().mean())
    return engine_step(engine).loss_scale_after


def _fail(engine: Any) -> None:
    raise OSError("a rank of its own mind")
