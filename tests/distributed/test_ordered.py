"""`ordered` on real ZeRO engines: what a discarded step leaves, and what loss scale, stages and shards do not do."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import cases
from tests.distributed.gang import Gang
from tests.distributed.readings import FP32_TOLERANCE, relative, trajectory

Gangs = Callable[[int], Gang]
STAGES = (1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_discarded_step_changes_no_bit_of_momentum_or_weights(gang: Gangs, stage: int, rank: int | None) -> None:
    runs = gang(2).run_once(cases.train, stage=stage, plants=[(4, 0, rank)])

    for run in runs:
        rows = run["rows"]
        assert [row["discarded"] for row in rows] == [step == 4 for step in range(8)]
        assert rows[4]["buffers_compared"] >= 1
        assert rows[4]["local_momentum_held"]
        assert (rows[4]["momentum"], rows[4]["weights"]) == (rows[3]["momentum"], rows[3]["weights"])
        # The counter-test: momentum that never moves would pass the lines above.
        assert not any(row["local_momentum_held"] for row in rows if not row["discarded"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stages_end_with_the_same_bits(gang: Gangs, precision: str) -> None:
    runs = [gang(2).run_once(cases.train, stage=stage, precision=precision)[0] for stage in STAGES]

    assert len(trajectory(runs[0])) == 8
    assert trajectory(runs[0]) == trajectory(runs[1]) == trajectory(runs[2])
    assert runs[0]["rows"][0]["weights"] != runs[0]["initial"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sharded_run_equals_plain_torch_on_the_full_batch(gang: Gangs, stage: int, world_size: int) -> None:
    run = gang(world_size).run_once(cases.train, stage=stage, precision="fp32", steps=6, keep_weights=True)[0]
    plain = cases.train_in_plain_torch(world_size=world_size, steps=6, micro_batch=4)

    assert relative(plain, run["weights"]) < FP32_TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_acts_on_the_gradient_as_in_plain_torch(gang: Gangs, stage: int) -> None:
    settings = {"weight_decay": 0.1}
    run = gang(2).run_once(
        cases.train, stage=stage, precision="fp32", steps=4, clip=0.1, keep_weights=True, settings=settings
    )[0]
    plain = cases.train_in_plain_torch(world_size=2, steps=4, micro_batch=4, clip=0.1, settings=settings)

    assert min(row["grad_norm"] for row in run["rows"]) > 0.1, "clipping was never active"
    assert relative(plain, run["weights"]) < FP32_TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_growing_loss_scale_changes_no_bit(gang: Gangs, stage: int, clip: float) -> None:
    growing = {"initial_scale_power": 8, "loss_scale_window": 2}
    moving = gang(2).run_once(cases.train, stage=stage, clip=clip, fp16=growing)[0]
    fixed = gang(2).run_once(cases.train, stage=stage, clip=clip, fp16={"loss_scale": 256})[0]

    assert moving["rows"][-1]["scale"][1] > 256, "the scale never grew"
    assert trajectory(moving) == trajectory(fixed)
    assert [row["grad_norm"] for row in moving["rows"]] == [row["grad_norm"] for row in fixed["rows"]]
    if clip:
        assert min(row["grad_norm"] for row in fixed["rows"]) > clip, "clipping was never active"


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_scale_that_falls_sixteenfold_changes_no_bit_of_later_steps(gang: Gangs, stage: int) -> None:
    falling = {"initial_scale_power": 12, "hysteresis": 1}
    # A planted overflow costs a step: compare with the same samples and plants at a fixed scale.
    plants = [(step, 0, 1) for step in (2, 3, 4, 5)]
    moving = gang(2).run_once(cases.train, stage=stage, fp16=falling, plants=plants)[0]
    fixed = gang(2).run_once(cases.train, stage=stage, fp16={"loss_scale": 512}, plants=plants)[0]

    assert [row["scale"] for row in moving["rows"][2:7]] == [
        (4096.0, 2048.0),
        (2048.0, 1024.0),
        (1024.0, 512.0),
        (512.0, 256.0),
        (256.0, 256.0),
    ]
    assert trajectory(moving) == trajectory(fixed)
    assert len(trajectory(moving)) == 4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_halving_after_an_overflow_on_one_rank_changes_no_bit_of_later_steps(
    gang: Gangs, stage: int, rank: int
) -> None:
    arguments = {"stage": stage, "plants": [(3, 0, rank)], "steps": 6}
    moving = gang(2).run_once(cases.train, fp16={"initial_scale_power": 10, "hysteresis": 1}, **arguments)
    fixed = gang(2).run_once(cases.train, fp16={"loss_scale": 1024}, **arguments)

    for run in moving:
        assert [row["scale"][1] for row in run["rows"]] == [1024.0] * 3 + [512.0] * 3
        # A discard before the first applied step would prove nothing.
        assert not any(row["discarded"] for row in run["rows"][:3])
        assert run["rows"][3]["buffers_compared"] >= 1
        assert run["rows"][3]["local_momentum_held"]
    assert trajectory(moving[0]) == trajectory(fixed[0])
    assert len(trajectory(moving[0])) == 5


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_the_middle_micro_batch_discards_the_whole_step(gang: Gangs, stage: int) -> None:
    halving = {"initial_scale_power": 10, "hysteresis": 1}
    arguments = {"stage": stage, "gas": 3, "steps": 5, "plants": [(2, 1, None)]}
    runs = gang(2).run_once(cases.train, fp16=halving, **arguments)
    fixed = gang(2).run_once(cases.train, fp16={"loss_scale": 1024}, **arguments)

    for run in runs:
        rows = run["rows"]
        assert [row["discarded"] for row in rows] == [False, False, True, False, False]
        assert rows[2]["buffers_compared"] >= 1
        assert rows[2]["momentum"] == rows[1]["momentum"]
        assert rows[3]["momentum"] != rows[1]["momentum"]
        assert rows[2]["scale"] == (1024.0, 512.0)
    assert trajectory(runs[0]) == trajectory(fixed[0])
    assert len(trajectory(runs[0])) == 4


@pytest.mark.parametrize("stage", STAGES)
def test_four_micro_batches_of_two_equal_one_of_eight(gang: Gangs, stage: int) -> None:
    one = gang(2).run_once(
        cases.train, stage=stage, precision="fp32", steps=4, micro_batch=8, split_batch=True, keep_weights=True
    )[0]
    four = gang(2).run_once(
        cases.train, stage=stage, precision="fp32", steps=4, micro_batch=2, gas=4, split_batch=True, keep_weights=True
    )[0]

    assert relative(one["weights"], four["weights"]) <= 1e-6
    assert len(four["rows"]) == 4, "micro-batches are not steps"


@pytest.mark.parametrize(
    ("stage", "precision", "options", "checks_added"),
    [
        (1, "fp32", {}, 0),
        (2, "fp32", {}, 0),
        (3, "fp32", {}, 0),
        (1, "bf16", {}, 0),
        (2, "bf16", {"extra": {"bf16": {"enabled": True, "check_grad_overflow": False}}}, 1),
        (1, "bf16", {"extra": {"bf16": {"enabled": True, "check_grad_overflow": False}}}, 1),
        (3, "bf16", {"extra": {"bf16": {"enabled": True, "check_grad_overflow": False}}}, 0),
        (2, "fp32", {"zero": {"compute_grad_norm": False}}, 1),
    ],
)
def test_a_nonfinite_gradient_reaches_nothing_in_any_dtype(
    gang: Gangs, stage: int, precision: str, options: dict[str, Any], checks_added: int
) -> None:
    runs = gang(2).run_once(
        cases.train, stage=stage, precision=precision, steps=5, plants=[(2, 0, 1)], plant=float("inf"), **options
    )

    for run in runs:
        rows = run["rows"]
        assert [row["discarded"] for row in rows] == [False, False, True, False, False]
        assert rows[2]["momentum"] == rows[1]["momentum"]
        assert rows[2]["weights"] == rows[1]["weights"]
        assert rows[3]["momentum"] != rows[1]["momentum"]
        assert all(all(row["momentum_finite"].values()) for row in rows)
        assert run["finite"]
        assert run["checks_added"] == checks_added


@pytest.mark.parametrize("stage", STAGES)
def test_a_static_loss_scale_discards_overflows_for_ever_and_never_dies(gang: Gangs, stage: int) -> None:
    run = gang(2).run_once(
        cases.train, stage=stage, fp16={"loss_scale": 1024}, plants=[(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    )[0]

    assert run["died"] is None
    assert [row["discarded"] for row in run["rows"]] == [step in (1, 2, 3) for step in range(8)]
    assert {row["scale"] for row in run["rows"]} == {(1024.0, 1024.0)}


def test_an_overflow_at_the_minimum_scale_ends_the_run_in_our_words(gang: Gangs) -> None:
    overflows = [(step, 0, 0) for step in range(8)]
    runs = gang(2).run_once(cases.train, stage=1, fp16={"initial_scale_power": 2, "hysteresis": 1}, plants=overflows)

    assert [run["died"] for run in runs] == [(2, 1.0), (2, 1.0)]
    assert len(runs[0]["rows"]) == 2


@pytest.mark.parametrize("stage", STAGES)
def test_the_reported_norms_are_of_the_unscaled_gradient_and_the_applied_update(gang: Gangs, stage: int) -> None:
    small = gang(2).run_once(cases.train, stage=stage, power=4, steps=3, micro_batch=2, plants=[(1, 0, None)])[0][
        "rows"
    ]
    large = gang(2).run_once(cases.train, stage=stage, power=9, steps=3, micro_batch=2, plants=[(1, 0, None)])[0][
        "rows"
    ]

    assert small[0]["grad_norm"] == pytest.approx(large[0]["grad_norm"], rel=1e-3)  # float16 gradients
    assert (small[1]["grad_norm"], small[1]["update_norm"]) == (math.inf, None)
    # Two ranks' two samples make gradients of rank 4: as many singular values near 1, times 40 / 24 where it is tall.
    assert small[0]["update_norm"] == pytest.approx(math.sqrt(4 * 40 / 24 + 4 + 4), rel=0.15)


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (2, {"round_robin_gradients": True}),
        (2, {"reduce_scatter": False}),
        (2, {"overlap_comm": True}),
        (1, {"contiguous_gradients": False}),
        (2, {"reduce_bucket_size": 500}),
        (3, {}),
        (3, {"reduce_scatter": False}),
        (3, {"sub_group_size": 500}),
    ],
)
def test_zero_settings_that_move_elements_change_no_bit(gang: Gangs, stage: int, zero: dict[str, Any]) -> None:
    plain = gang(2).run_once(cases.train, stage=1)[0]
    other = gang(2).run_once(cases.train, stage=stage, zero=zero)[0]

    assert trajectory(other) == trajectory(plain)


def test_a_small_bucket_sends_the_same_in_more_chunks(gang: Gangs) -> None:
    large = gang(2).run_once(cases.train, stage=3)[0]
    small = gang(2).run_once(cases.train, stage=3, settings={"bucket_elements": 1000})[0]

    assert trajectory(small) == trajectory(large)
    assert small["elements_sent"] == large["elements_sent"]
    assert small["exchange_collectives"] > large["exchange_collectives"]


def test_whole_matrices_stay_and_only_straddling_ones_travel(gang: Gangs) -> None:
    matrices, steps = 24 * 40 + 40 * 24 + 24 * 17, 4
    first, third = (gang(2).run_once(cases.train, stage=stage, steps=steps) for stage in (1, 3))

    # The cut at half of 2328 elements goes through the second matrix (960 elements at 960) alone.
    assert max(run["elements_sent"] for run in first) <= steps * 960
    assert sum(run["elements_sent"] for run in first) < steps * 2 * 960
    # Half of each travels there and back, shared by two ranks: 2 (W - 1) N / W^2 a rank, on average.
    assert sum(run["elements_sent"] for run in third) == pytest.approx(steps * matrices, rel=0.01)
    assert sum(run["ns_calls"] for run in first) == sum(run["ns_calls"] for run in third) == steps * 3


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_a_half_precision_wire_rounds_what_travels_and_no_more(gang: Gangs, dtype: str, tolerance: float) -> None:
    # Batches of full rank: rounding does not fall into directions that the iteration magnifies.
    arguments = {
        "stage": 3,
        "precision": "fp32",
        "steps": 3,
        "micro_batch": 64,
        "keep_weights": True,
        "loss_factor": 1e-9,  # float16 alone would send zeros
    }
    exact = gang(2).run_once(cases.train, **arguments)[0]
    rounded = gang(2).run_once(cases.train, **arguments, settings={"wire_dtype": getattr(torch, dtype)})[0]

    assert 0 < relative(exact["weights"], rounded["weights"]) < tolerance


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 5, "warmup_type": "linear"},
}


def rates(gang: Gangs, stage: int, **settings: Any) -> list[float]:
    """The learning rate of each of five steps, of which the third is discarded."""
    runs = gang(2).run_once(
        cases.train, stage=stage, steps=5, plants=[(2, 0, 1)], extra={"scheduler": WARMUP}, settings=settings
    )
    assert [row["discarded"] for row in runs[0]["rows"]] == [False, False, True, False, False]
    assert [row["lr"] for row in runs[0]["rows"]] == [row["lr"] for row in runs[1]["rows"]]
    return [row["lr"] for row in runs[0]["rows"]]


@pytest.mark.parametrize("stage", STAGES)
def test_a_learning_rate_schedule_waits_for_applied_steps(gang: Gangs, stage: int) -> None:
    lrs = rates(gang, stage)

    assert lrs[3] == lrs[2] > lrs[1]
    assert lrs[4] > lrs[3]


@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_that_counts_discarded_steps_is_one_ahead_after_one(gang: Gangs, stage: int) -> None:
    waiting, counting = rates(gang, stage), rates(gang, stage, schedule_counts_discarded_steps=True)

    assert counting[:3] == waiting[:3]
    assert counting[3] == waiting[4]
    assert counting[4] > counting[3] > counting[2]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ns_method", ["standard", "polar_express"])
def test_every_update_setting_runs_the_same_at_every_stage(gang: Gangs, nesterov: bool, ns_method: str) -> None:
    settings = {"nesterov": nesterov, "ns_method": ns_method, "ns_steps": 4, "momentum": 0.8, "weight_decay": 0.1}
    run = gang(2).run_once(cases.train, stage=3, precision="fp32", steps=4, keep_weights=True, settings=settings)[0]
    plain = cases.train_in_plain_torch(world_size=2, steps=4, micro_batch=4, settings=settings)

    assert relative(plain, run["weights"]) < FP32_TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_smaller_than_its_ranks_trains(gang: Gangs, stage: int) -> None:
    runs = gang(3).run_once(cases.train, stage=stage, widths=(2, 1, 3), steps=3)

    assert len({run["rows"][-1]["weights"] for run in runs}) == 1
    assert runs[0]["rows"][-1]["weights"] != runs[0]["initial"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_run_twice_gives_the_same_bits(gang: Gangs, stage: int) -> None:
    first, second = (gang(2).run(cases.train, stage=stage, steps=3) for _ in range(2))

    assert trajectory(first[0]) == trajectory(second[0])
    assert trajectory(first[0]) == trajectory(first[1]), "the ranks disagree"


@pytest.mark.parametrize(("world_size", "gas"), [(3, 1), (2, 3), (3, 3)])
def test_where_deepspeed_sums_in_another_order_stages_agree_to_rounding(gang: Gangs, world_size: int, gas: int) -> None:
    ends = [
        gang(world_size).run_once(cases.train, stage=stage, precision="fp32", steps=4, gas=gas, keep_weights=True)[0][
            "weights"
        ]
        for stage in STAGES
    ]

    # Traced in test_reduction_order.py: a few float32 roundings, which Newton-Schulz carries on.
    assert relative(ends[0], ends[1]) < FP32_TOLERANCE
    assert relative(ends[0], ends[2]) < FP32_TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_resumes_to_the_same_bits(gang: Gangs, stage: int, tmp_path: Path) -> None:
    whole, resumed = gang(2).run(cases.resume, stage=stage, folder=str(tmp_path))[0]

    assert whole[0] != whole[1], "nothing was trained after the checkpoint"
    assert resumed == whole
