"""Every shape through ZeRO, one by one: what each weight becomes is what plain torch makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import shape_cases
from tests.distributed.gang import Gang
from tests.distributed.readings import FP32_TOLERANCE, relative
from tests.distributed.scenario import Zoo, digest

Gangs = Callable[[int], Gang]
KINDS = {
    "an embedding tied to the head": "wte.weight",
    "a 4-D convolution": "conv.weight",
    "heads": "heads.weight",
    "3-D experts": "experts",
    "fused parts of unequal rows": "fused.weight",
    "a wide matrix": "unfused.weight",
    "a tall matrix that straddles partitions": "tall.weight",
    "a bias": "tall.bias",
    "a 1xN matrix": "value.weight",
    "a single element": "value.bias",
}
EVERYWHERE = [(stage, world_size) for world_size in (2, 3) for stage in (1, 2, 3)]


@pytest.fixture(params=EVERYWHERE, ids=lambda place: f"stage {place[0]}, {place[1]} ranks")
def place(request: pytest.FixtureRequest) -> tuple[int, int]:
    stage, world_size = request.param
    return stage, world_size


def trained(gang: Gangs, place: tuple[int, int]) -> dict[str, Any]:
    return gang(place[1]).run_once(shape_cases.sharded, stage=place[0])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_parameter_trains_as_in_plain_torch(gang: Gangs, place: tuple[int, int], kind: str) -> None:
    name = KINDS[kind]
    expected, initial = shape_cases.plain(place[1])[name], shape_cases.plain(place[1], steps=0)[name]
    actual = trained(gang, place)["weights"][name]

    assert relative([expected], [actual]) < FP32_TOLERANCE
    assert relative([initial], [actual]) > 1e-3, "it was not trained"


def test_all_that_trains_is_compared_and_no_rank_differs(gang: Gangs, place: tuple[int, int]) -> None:
    runs = gang(place[1]).run_once(shape_cases.sharded, stage=place[0])

    assert set(runs[0]["weights"]) == set(shape_cases.plain(place[1]))
    assert set(KINDS.values()) < set(runs[0]["weights"])
    assert all(run["weights"] == runs[0]["weights"] for run in runs)
    assert max(run["elements_sent"] for run in runs) > 0, "nothing straddled a partition"


def test_frozen_and_empty_parameters_are_left_alone(gang: Gangs, place: tuple[int, int]) -> None:
    torch.manual_seed(0)
    run = trained(gang, place)

    assert run["frozen"] in (digest([Zoo().frozen]), None)
    assert run["routes"]["frozen"] == "frozen"
    assert run["routes"].get("empty", "absent") == ("frozen" if place[0] < 3 else "absent")
    assert {"frozen", "empty"}.isdisjoint(run["weights"])


def test_an_empty_parameter_is_refused_where_deepspeed_cannot_gather_it(gang: Gangs) -> None:
    for message in gang(2).run(shape_cases.empty_at_stage_three):
        assert message == "empty has no elements, and DeepSpeed's stage 3 cannot gather it; use stage 1 or 2"


def test_deepspeed_itself_cannot_train_an_empty_parameter_at_stage_three(gang: Gangs) -> None:
    # The refusal's reason: with an optimizer of torch's and nothing of ours. Once this trains, the refusal can go.
    for message in gang(2).run(shape_cases.empty_under_adamw_at_stage_three):
        assert message.startswith("ValueError: torch.cat()")


def test_alone_a_rank_trains_beside_an_empty_parameter_at_stage_three(gang: Gangs) -> None:
    (run,) = gang(1).run_once(shape_cases.sharded, stage=3)
    plain = shape_cases.plain(1)

    assert run["routes"]["empty"] == "frozen"
    assert set(run["weights"]) == set(plain)
    assert relative(list(plain.values()), [run["weights"][name] for name in plain]) < FP32_TOLERANCE
