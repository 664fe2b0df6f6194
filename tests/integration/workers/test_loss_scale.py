"""The loss scaler's course, step by step, with the numbers that DeepSpeed 0.19.8 gives (cases B01 to B12)."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.gang import Gang
from tests.integration.workers.training_cases import resume, run_spec


def rank_0(ranks: Gang, spec: dict[str, Any]) -> Any:
    return ranks.run_once(run_spec, spec=spec)[0]


def planted(steps: range, kind: str = "inf") -> list[dict[str, Any]]:
    return [{"kind": kind, "step": step} for step in steps]


def scales(run: Any, name: str) -> list[float]:
    return [record[f"loss_scale_{name}"] for record in run["records"]]


@pytest.mark.parametrize(("loss_scale", "death"), [({}, 17), ({"hysteresis": 1}, 16), ({"initial_power": 4}, 5)])
def test_b01_overflow_in_every_step_dies_when_the_scale_is_at_its_minimum(
    ranks: Gang, loss_scale: dict[str, int], death: int
) -> None:
    run = rank_0(ranks, {"steps": 30, "loss_scale": loss_scale, "faults": planted(range(30))})

    assert (run["error"], run["attempting"], len(run["records"])) == ("LossScaleExhausted", death, death)
    assert all(record["overflow"] and record["discarded"] for record in run["records"])
    assert run["records"][-1]["loss_scale_after"] == 1.0


def test_b02_the_first_overflow_spends_hysteresis_and_the_next_ones_halve(ranks: Gang) -> None:
    run = rank_0(ranks, {"steps": 3, "faults": planted(range(3))})

    assert scales(run, "before") == [65536.0, 65536.0, 32768.0]
    assert scales(run, "after") == [65536.0, 32768.0, 16384.0]


def test_b04_the_scale_doubles_after_each_window_and_counts_anew_after_an_overflow(ranks: Gang) -> None:
    growing = {"steps": 14, "loss_scale": {"initial_power": 4, "window": 4, "hysteresis": 1}}
    calm = rank_0(ranks, growing)
    after_one = rank_0(ranks, {**growing, "faults": planted(range(1))})

    assert scales(calm, "after") == [16.0] * 4 + [32.0] * 4 + [64.0] * 4 + [128.0] * 2
    assert scales(after_one, "after")[:6] == [8.0, 8.0, 8.0, 8.0, 8.0, 16.0]
    assert (calm["error"], after_one["error"]) == (None, None)
    assert [record["discarded"] for record in after_one["records"]] == [True] + [False] * 13


def test_b05_a_step_that_bf16_discards_is_recorded_as_one(ranks: Gang) -> None:
    run = rank_0(ranks, {"steps": 4, "precision": "bf16", "faults": planted(range(1, 2))})

    assert [record["overflow"] for record in run["records"]] == [False, True, False, False]
    assert [record["discarded"] for record in run["records"]] == [False, True, False, False]
    assert set(scales(run, "after")) <= {1.0, None}
    assert all(math.isfinite(record["momentum_norm"]) for record in run["records"])
    assert run["records"][1]["parameter_norms"] == run["records"][0]["parameter_norms"]


def test_b07_one_nan_loss_costs_a_step_and_half_the_scale(ranks: Gang) -> None:
    scale = {"initial_power": 4, "hysteresis": 1}
    run = rank_0(ranks, {"steps": 4, "loss_scale": scale, "faults": planted(range(1, 2), "nan")})

    assert [math.isnan(record["loss"]) for record in run["records"]] == [False, True, False, False]
    assert scales(run, "after") == [16.0, 8.0, 8.0, 8.0]
    assert (run["error"], run["final"]["parameters_moved"]) == (None, 10)


def test_b10_a_resumed_run_has_the_scalers_state_too(ranks: Gang, tmp_path: Path) -> None:
    spec = {
        "steps": 7,
        "loss_scale": {"initial_power": 8, "hysteresis": 2, "window": 3},
        "faults": planted(range(1, 3)),
        "checkpoint": {"every_steps": 4},
    }
    said = ranks.run(resume, spec=spec, root=str(tmp_path))[0]

    assert said["first_step"] == 4
    assert scales(said["whole"], "after") == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0, 256.0]
    assert said["resumed"]["records"] == said["whole"]["records"][4:]
    assert said["resumed"]["final_hash"] == said["whole"]["final_hash"]


def test_b12_a_static_scale_discards_and_stays(ranks: Gang) -> None:
    run = rank_0(ranks, {"steps": 4, "loss_scale": {"static": 128.0}, "faults": planted(range(1, 2))})

    assert [record["overflow"] for record in run["records"]] == [False, True, False, False]
    assert {*scales(run, "before"), *scales(run, "after")} == {128.0}
    assert run["final"]["parameters_moved"] == 10
