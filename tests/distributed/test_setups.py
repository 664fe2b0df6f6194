"""What is refused before training, with the reason; and what the momentum views promise."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import attachment_cases, cases
from tests.distributed.gang import Gang
from tests.distributed.scenario import ds_config

Gangs = Callable[[int], Gang]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ds_config(stage=0), "ZeRO stage 0"),
        (ds_config(stage=1, precision="bf16", data_types={"grad_accum_dtype": "fp32"}), "BF16_Optimizer"),
    ],
)
def test_a_layout_we_do_not_know_is_refused_with_the_reason(gang: Gangs, config: dict[str, Any], reason: str) -> None:
    for message in gang(2).run(cases.refusal, config=config):
        assert reason in message


def test_tags_that_would_start_deepspeeds_own_muon_are_refused(gang: Gangs) -> None:
    for message in gang(2).run(cases.refusal, config=ds_config(stage=1), tag=True):
        assert "UnsupportedSetup" in message
        assert "use_muon" in message
        assert "layers.0.weight" in message


def test_deepspeeds_master_is_refused_at_stage_three(gang: Gangs) -> None:
    (message,) = gang(1).run(cases.refusal, config=ds_config(stage=3), implementation="deepspeed")

    assert "no ordering 'master' at ZeRO stage 3" in message
    assert "choose one of deferred" in message


def test_an_engine_nobody_attached_says_so(gang: Gangs) -> None:
    (message,) = gang(1).run(cases.unseen_engine)

    assert message.count("call muon_core.attach") == 2


def test_ranks_with_different_models_are_refused_everywhere(gang: Gangs) -> None:
    for message in gang(2).run(cases.ranks_that_disagree):
        assert "the ranks do not hold the same parameters" in message


@pytest.mark.parametrize("implementation", ["muon_core", "deepspeed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_views_hold_every_element_once_and_live(gang: Gangs, stage: int, implementation: str) -> None:
    results = gang(2).run(cases.views, stage=stage, implementation=implementation)
    elements: dict[int, int] = {}
    kinds: dict[int, str] = {}
    for result in results:
        for index, numel, kind in result["by_parameter"]:
            elements[index] = elements.get(index, 0) + numel
            kinds[index] = kind
        assert result["live"]
        assert result["cached"]
        assert result["one_dimensional"]
        assert result["follows_new_buffers"]

    assert elements == {0: 960, 1: 40, 2: 960, 3: 24, 4: 408, 5: 17}
    assert kinds == {0: "muon", 1: "adamw", 2: "muon", 3: "adamw", 4: "muon", 5: "adamw"}


@pytest.mark.parametrize("stage", [1, 3])
def test_reading_the_momentum_changes_nothing(gang: Gangs, stage: int) -> None:
    with_reading = gang(2).run(cases.half_trained_bits, stage=stage, read_views=True)
    without = gang(2).run(cases.half_trained_bits, stage=stage, read_views=False)

    assert with_reading == without


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no engine", "attach was given a Stack, which is no DeepSpeed engine"),
        ("another optimizer", "the engine steps another optimizer (SGD)"),
        ("frozen", "layers.1.weight was frozen after build_optimizer routed it"),
        ("unfrozen", "layers.1.weight was unfrozen, or added, after build_optimizer routed it"),
        ("one rank fails", "a rank of its own mind"),
    ],
)
def test_an_attachment_that_would_train_something_else_is_refused_on_every_rank(
    gang: Gangs, kind: str, reason: str
) -> None:
    for message in gang(2).run(attachment_cases.misuse, kind=kind):
        assert reason in message


@pytest.mark.skipif(os.environ.get("DS_ACCELERATOR") == "cuda", reason="GPUs iterate in float16")
def test_ranks_on_unlike_processors_all_iterate_in_float32(gang: Gangs) -> None:
    found = {native: gang(2).run(attachment_cases.iterated_in, native_ranks=native) for native in [(), (1,), (0, 1)]}

    dtypes = {native: [rank["dtype"] for rank in ranks] for native, ranks in found.items()}
    assert dtypes.pop((0, 1)) == ["torch.bfloat16"] * 2, "the counter-check: alike ranks keep what is fast"
    assert all(said == ["torch.float32"] * 2 for said in dtypes.values())
    assert torch.equal(found[(1,)][0]["weights"], found[()][0]["weights"])
    assert not torch.equal(found[(0, 1)][0]["weights"], found[()][0]["weights"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_attachment_is_refused_and_the_first_goes_on(gang: Gangs, stage: int) -> None:
    for run in gang(2).run(attachment_cases.attached_twice, stage=stage):
        assert "this optimizer is attached already" in run["message"]
        assert (run["momentum_kept"], run["compared"]) == (True, 6)
        assert run["scales"] == sorted(run["scales"])
        assert run["scales"][-1] > 256, "the scale never grew"
