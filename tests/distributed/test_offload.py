"""Optimizer state on the CPU, at every stage: the same bits as where it is not offloaded."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import cases, offload_cases
from tests.distributed.gang import Gang
from tests.distributed.offload_cases import ALLOW, OFFLOAD
from tests.distributed.readings import FP32_TOLERANCE, on_one_device, relative, trajectory
from tests.distributed.scenario import ds_config

Gangs = Callable[[int], Gang]
STAGES = (1, 2, 3)


@on_one_device
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_offloaded_state_takes_the_same_steps_to_the_last_bit(gang: Gangs, stage: int, precision: str) -> None:
    arguments: dict[str, Any] = {"stage": stage, "precision": precision, "steps": 5}
    arguments |= {"plants": [(2, 0, 1)], "plant": float("inf")}
    kept = gang(2).run_once(cases.train, **arguments)
    offloaded = gang(2).run_once(cases.train, zero=OFFLOAD, extra=ALLOW, **arguments)

    for run in offloaded:
        assert [row["discarded"] for row in run["rows"]] == [False, False, True, False, False]
        assert run["rows"][2]["buffers_compared"] >= 1
        assert run["rows"][2]["local_momentum_held"]
        assert not run["rows"][3]["local_momentum_held"]
    assert trajectory(offloaded[0]) == trajectory(kept[0])
    assert len(trajectory(offloaded[0])) == 4


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scope", ["gradient", "update"])
def test_clipping_and_accumulation_are_the_same_under_offload(gang: Gangs, stage: int, scope: str) -> None:
    arguments: dict[str, Any] = {"stage": stage, "precision": "fp32", "steps": 3, "gas": 2, "clip": 0.05}
    arguments |= {"keep_weights": True, "settings": {"clip_scope": scope}}
    kept = gang(2).run_once(cases.train, **arguments)[0]
    offloaded = gang(2).run_once(cases.train, zero=OFFLOAD, extra=ALLOW, **arguments)[0]

    # DeepSpeed sums the norm in float64 there, and elsewhere in float32.
    assert relative(kept["weights"], offloaded["weights"]) < FP32_TOLERANCE
    assert [row["grad_norm"] for row in offloaded["rows"]] == pytest.approx(
        [row["grad_norm"] for row in kept["rows"]], rel=1e-6
    )
    assert kept["rows"][-1]["weights"] != kept["initial"]


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_discarded_step_left_is_no_later_steps_gradient(gang: Gangs, stage: int) -> None:
    case = offload_cases.an_idle_parameter_after_a_discarded_step
    kept, offloaded = (gang(2).run(case, stage=stage, is_offloaded=offloads) for offloads in (False, True))

    for run in offloaded:
        assert run["is_offloaded"]
        assert run["discarded"] == [False, True, False, False]
        assert run["finite"]
        assert run["devices"] == {"cpu"}
    assert offloaded[0]["bits"] == kept[0]["bits"]
    assert len(set(kept[0]["bits"])) == 3, "the discarded step alone repeats the bits before it"


def test_an_ordering_that_acts_before_the_check_is_refused(gang: Gangs) -> None:
    config = ds_config(stage=2, zero=OFFLOAD, **ALLOW)

    for message in gang(2).run(cases.refusal, config=config, ordering="master"):
        assert "UnsupportedSetup: step_ordering master" in message
        assert "remove offload_optimizer" in message
