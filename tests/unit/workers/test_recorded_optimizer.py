"""What is read out of the parameter groups of a script's own optimizer."""

from typing import Any

import torch

import muon_core
from muonscope.contract.run_spec import OptimizerSettings
from workers.recorded_optimizer import optimizer_settings


def _model() -> torch.nn.Module:
    return torch.nn.Linear(4, 4)


def _read(groups: list[dict[str, Any]]) -> tuple[OptimizerSettings, list[str]]:
    said, unlike = optimizer_settings(groups, ns_method="standard")
    return OptimizerSettings.model_validate(said), unlike


def test_our_optimizer_is_read_as_it_was_built() -> None:
    built = muon_core.build_optimizer(
        _model(), lr=0.03, momentum=0.9, weight_decay=0.1, nesterov=False, ns_method="polar_express", ns_steps=6,
        adam={"lr": 1e-4, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.2},
    )  # fmt: skip

    read, unlike = _read(built.param_groups)

    assert read.model_dump(exclude={"schedule"}) == {
        "lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "ns_method": "polar_express",
        "ns_steps": 6,
        "adam": {"lr": 1e-4, "beta1": 0.8, "beta2": 0.95, "eps": 1e-7, "weight_decay": 0.2},
    }  # fmt: skip
    assert unlike == []


def test_deepspeeds_muon_is_read_by_its_halves_and_its_iteration_is_its_releases() -> None:
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,)))
    muon = {"params": [matrix], "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
    adam = {"params": [bias], "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}

    # Whichever half comes first.
    read, unlike = _read([adam, muon])

    assert (read.lr, read.momentum, read.ns_method) == (0.02, 0.95, "standard")
    assert (read.adam.lr, read.adam.beta2, read.adam.eps) == (3e-4, 0.95, 1e-10)
    assert unlike == []


def test_adam_alone_is_all_that_there_is() -> None:
    read, _ = _read(torch.optim.AdamW(_model().parameters(), lr=torch.tensor(0.5), betas=(0.5, 0.75)).param_groups)

    assert (read.lr, read.momentum, read.weight_decay) == (0.5, 0.0, 0.01)
    assert (read.adam.lr, read.adam.beta1, read.adam.beta2, read.adam.weight_decay) == (0.5, 0.5, 0.75, 0.01)


def test_settings_in_which_groups_of_one_kind_differ_are_told() -> None:
    model = _model()
    groups: list[dict[str, Any]] = [{"params": [weight]} for weight in model.parameters()]
    groups[1]["weight_decay"] = 0.0
    adam = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)

    read, unlike = _read(adam.param_groups)

    assert read.adam.weight_decay == 0.1
    assert unlike == ["optimizer.adam.weight_decay=0.1 is the first group's, and others have 0.0"]
    # Counter-test: groups that are set alike are told of by no word.
    adam.param_groups[1]["weight_decay"] = 0.1
    assert _read(adam.param_groups)[1] == []


def test_the_rate_is_the_one_that_a_schedule_has_a_share_of() -> None:
    adam = torch.optim.AdamW(_model().parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(adam, lambda step: step / 10)

    assert adam.param_groups[0]["lr"] == 0
    assert _read(adam.param_groups)[0].adam.lr == 1e-3
