"""The three clip scopes on real engines: against plain torch, DeepSpeed's own Muon, and a moving loss scale."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import cases, clipping_cases
from tests.distributed.gang import Gang
from tests.distributed.readings import FP32_TOLERANCE, relative, trajectory

Gangs = Callable[[int], Gang]
STAGES = (1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
def test_the_update_scope_scales_updates_and_adamw_gradients_by_their_common_norm(gang: Gangs, stage: int) -> None:
    run = gang(2).run_once(
        cases.train,
        stage=stage,
        precision="fp32",
        steps=4,
        clip=1.0,
        keep_weights=True,
        settings={"clip_scope": "update"},
    )[0]
    by_hand = clipping_cases.update_clipped_by_hand(world_size=2, steps=4, micro_batch=4, clip=1.0)

    assert min(row["clip_norm"] for row in run["rows"]) > 1.0, "clipping was never active"
    assert relative(by_hand, run["weights"]) < FP32_TOLERANCE
    assert max(row["update_norm"] for row in run["rows"]) <= 1.0


@pytest.mark.parametrize("stage", STAGES)
def test_an_exempt_muon_leaves_adamws_gradients_to_their_own_norm(gang: Gangs, stage: int) -> None:
    arguments: dict[str, Any] = {"steps": 4, "clip": 0.01}
    run = gang(2).run_once(
        cases.train,
        stage=stage,
        precision="fp32",
        keep_weights=True,
        settings={"clip_scope": "muon_exempt"},
        **arguments,
    )[0]
    plain = cases.train_in_plain_torch(world_size=2, micro_batch=4, clip_scope="muon_exempt", **arguments)

    assert min(row["clip_norm"] for row in run["rows"]) > 0.01, "clipping was never active"
    assert relative(plain, run["weights"]) < FP32_TOLERANCE
    assert run["rows"][0]["clip_norm"] < run["rows"][0]["grad_norm"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_update_scope_clips_as_deepspeeds_own_muon_does(gang: Gangs, stage: int) -> None:
    native, ours, other = (
        gang(2).run_once(clipping_cases.clipped, stage=stage, implementation=name, clip_scope=scope, clip=1.0)[0]
        for name, scope in (("deepspeed", "update"), ("muon_core", "update"), ("muon_core", "gradient"))
    )

    # Their Newton-Schulz runs in float16 and restarts at another iteration.
    assert ours["norms"] == pytest.approx(native["norms"], rel=1e-2)
    assert relative(native["weights"], ours["weights"]) < 1e-2
    # The control: clipping the gradient moves Muon several times as far.
    assert relative(native["weights"], other["weights"]) > 0.1


@pytest.mark.parametrize("scope", ["update", "muon_exempt"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_growing_loss_scale_changes_no_bit_in_any_scope(gang: Gangs, stage: int, scope: str) -> None:
    arguments: dict[str, Any] = {"stage": stage, "clip": 0.01, "steps": 5, "settings": {"clip_scope": scope}}
    growing = {"initial_scale_power": 8, "loss_scale_window": 2}
    moving = gang(2).run_once(cases.train, fp16=growing, **arguments)[0]
    fixed = gang(2).run_once(cases.train, fp16={"loss_scale": 256}, **arguments)[0]

    assert moving["rows"][-1]["scale"][1] > 256, "the scale never grew"
    assert trajectory(moving) == trajectory(fixed)
    assert [row["clip_norm"] for row in moving["rows"]] == [row["clip_norm"] for row in fixed["rows"]]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_discarded_step_is_not_measured_and_changes_no_bit(gang: Gangs, stage: int) -> None:
    run = gang(2).run_once(
        cases.train, stage=stage, steps=4, clip=1.0, plants=[(2, 0, 1)], settings={"clip_scope": "update"}
    )[0]
    rows = run["rows"]

    assert [row["discarded"] for row in rows] == [False, False, True, False]
    assert [row["clip_norm"] is None for row in rows] == [False, False, True, False]
    assert (rows[2]["momentum"], rows[2]["weights"]) == (rows[1]["momentum"], rows[1]["weights"])
    assert rows[3]["momentum"] != rows[2]["momentum"]
    assert run["clip_all_reduces"] == 3


@pytest.mark.parametrize("ordering", ["master", "deferred"])
def test_orderings_differ_in_nothing_under_the_update_scope(gang: Gangs, ordering: str) -> None:
    arguments: dict[str, Any] = {"stage": 2, "steps": 4, "clip": 1.0, "settings": {"clip_scope": "update"}}
    other = gang(2).run_once(cases.train, ordering=ordering, **arguments)[0]
    ordered = gang(2).run_once(cases.train, **arguments)[0]

    assert trajectory(other) == trajectory(ordered)
    assert len(trajectory(other)) == 4
