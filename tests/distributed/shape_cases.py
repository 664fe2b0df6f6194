"""A model with a parameter of every shape, under ZeRO and in plain torch."""

from functools import cache
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import muon_core
from muon_core.errors import UnsupportedSetup
from muon_core.zero.precision import engine_step
from tests.distributed.scenario import Zoo, digest, ds_config, full_weights, muon_engine, take_down

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
Weights = dict[str, list[float]]


def sharded(*, stage: int, steps: int = 3) -> dict[str, Any]:
    """Train it on this gang; what each rank holds at the end."""
    torch.manual_seed(0)
    model = Zoo(has_empty=stage < 3 or dist.get_world_size() == 1)
    config = ds_config(stage=stage, precision="fp32")
    with muon_engine(model, config, **SETTINGS, adam=ADAM, iteration_dtype=torch.float32) as (engine, optimizer):
        for step in range(steps):
            engine.backward(_loss(engine, step, dist.get_rank(), engine.device))
            engine_step(engine)
        names = [name for name, p in engine.module.named_parameters() if p.requires_grad and name != "empty"]
        return {
            "weights": dict(zip(names, (weight.tolist() for weight in full_weights(engine)), strict=True)),
            "frozen": digest([engine.module.frozen]) if stage < 3 else None,
            "routes": {entry.name: entry.route for entry in optimizer.routed},
            "elements_sent": optimizer.exchange.elements_sent,
        }


def empty_at_stage_three() -> str:
    """Ask for what DeepSpeed cannot gather; say the reason."""
    try:
        with muon_engine(Zoo(), ds_config(stage=3, precision="fp32")):
            pass
    except UnsupportedSetup as error:
        return str(error)
    raise AssertionError("the set-up was accepted")


def empty_under_adamw_at_stage_three() -> str:
    """Train the same model with nothing of ours: what DeepSpeed itself says."""
    torch.manual_seed(0)
    model = Zoo()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage=3, precision="fp32"))
    try:
        engine.backward(_loss(engine, 0, dist.get_rank(), engine.device))
        engine.step()
        return "it trained"
    except ValueError as error:
        return f"ValueError: {error}"
    finally:
        take_down(engine)


@cache
def plain(world_size: int, steps: int = 3) -> Weights:
    """The same on the full batch, in this process."""
    torch.manual_seed(0)
    model = Zoo()
    groups = muon_core.parameters.build_param_groups(model, muon_core.route_parameters(model), SETTINGS, ADAM)
    optimizer = muon_core.Muon(groups)
    for step in range(steps):
        losses = [_loss(model, step, rank, torch.device("cpu")) for rank in range(world_size)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: parameter.detach().flatten().tolist()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


def _loss(net: Any, step: int, rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 11, (4, 6), generator=generator).to(device)
    return functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
