"""Two real ranks train real specs: what is recorded is what happened."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.run_spec import SUPPORTED_ORDERINGS
from tests.distributed.gang import Gang
from tests.integration.workers.training_cases import build_error, resolved_config, run_spec

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "deepspeed.json").read_text())
THIRTY = {"optimizer": {"lr": 0.05}}
CALM_BOOM = {
    "task": {"name": "calm_boom"},
    "optimizer": {"momentum": 0.9, "lr": 0.01},
    "loss_scale": {"initial_power": 4},
    "steps": 4,
}


def rank_0(ranks: Gang, spec: dict[str, Any]) -> Any:
    return ranks.run_once(run_spec, spec=spec)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_from_a_high_scale_records_seventeen_steps_and_dies_attempting_the_next(ranks: Gang, stage: int) -> None:
    run = rank_0(ranks, {**THIRTY, "step_ordering": "master", "zero_stage": stage})

    assert [record["step"] for record in run["records"]] == list(range(17))
    assert (run["error"], run["attempting"]) == ("LossScaleExhausted", 17)
    assert all(record["discarded"] for record in run["records"])
    assert not math.isfinite(run["records"][-1]["momentum_norm"])
    assert run["final"]["parameters_moved"] == 0
    assert run["final"]["parameters_total"] == 10
    # Casting alone changed them all: the count that misleads.
    assert run["final"]["parameters_changed_before_cast"] == 10


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ordered_from_the_same_scale_trains_every_parameter(ranks: Gang, stage: int) -> None:
    run = rank_0(ranks, {**THIRTY, "step_ordering": "ordered", "zero_stage": stage})

    assert run["error"] is None
    assert [record["step"] for record in run["records"]] == list(range(30))
    assert run["final"]["parameters_moved"] == run["final"]["parameters_total"] == 10
    assert run["final"]["max_weight_motion"] > 0.1
    assert all(math.isfinite(record["momentum_norm"]) for record in run["records"])
    assert run["records"][-1]["loss"] < run["records"][0]["loss"]


def test_a_discarded_step_leaves_ordered_momentum_as_it_was(ranks: Gang) -> None:
    records = rank_0(ranks, CALM_BOOM)["records"]

    assert [record["discarded"] for record in records] == [False, True, False, False]
    assert records[1]["parameter_norms"] == records[0]["parameter_norms"]
    assert records[2]["parameter_norms"] != records[1]["parameter_norms"]


def test_a_pair_shares_data_and_seeds_and_is_equal_before_the_overflow(ranks: Gang) -> None:
    ordered, master = (rank_0(ranks, {**CALM_BOOM, "step_ordering": ordering}) for ordering in ("ordered", "master"))

    assert ordered["records"][0] == master["records"][0]
    assert ordered["records"][1] != master["records"][1]
    assert (ordered["data_hash"], ordered["initial_hash"]) == (master["data_hash"], master["initial_hash"])


def test_another_seed_has_other_hashes(ranks: Gang) -> None:
    one, other = (rank_0(ranks, {"steps": 2, "seed": seed}) for seed in (0, 1))

    assert one["data_hash"] != other["data_hash"]
    assert one["initial_hash"] != other["initial_hash"]


def test_deepspeeds_own_master_gives_the_published_momentum_norms(ranks: Gang) -> None:
    run = rank_0(ranks, {**CALM_BOOM, "implementation": "deepspeed", "step_ordering": "master"})
    golden = GOLDEN["orderings"]["z1_master"]["rows"]

    for record, row in zip(run["records"], golden, strict=False):
        assert record["parameter_norms"] == pytest.approx(row["after_step"], rel=1e-6, nan_ok=True)
    assert len(run["records"]) == 4
    assert run["records"][2]["largest_parameter"] == 1


DISCARDS_THE_SECOND = {"loss_scale": {"initial_power": 4}, "steps": 5, "faults": [{"kind": "inf", "step": 1}]}


@pytest.mark.parametrize(
    ("implementation", "ordering", "counts", "lrs"),
    [
        ("muon_core", "ordered", False, [0.025, 0.05, 0.05, 0.05, 0.0375]),
        ("muon_core", "ordered", True, [0.025, 0.05, 0.05, 0.0375, 0.025]),
        ("deepspeed", "deferred", False, [0.025, 0.05, 0.05, 0.05, 0.0375]),
    ],
)
def test_a_schedule_advances_on_discarded_steps_only_when_asked(
    ranks: Gang, implementation: str, ordering: str, counts: bool, lrs: list[float]
) -> None:
    schedule = {"warmup_steps": 2, "decay": "linear", "final_share": 0.5, "counts_discarded_steps": counts}
    run = rank_0(
        ranks,
        {
            **DISCARDS_THE_SECOND,
            "implementation": implementation,
            "step_ordering": ordering,
            "optimizer": {"lr": 0.05, "schedule": schedule},
        },
    )

    assert [record["discarded"] for record in run["records"]] == [False, True, False, False, False]
    assert [record["lr"] for record in run["records"]] == pytest.approx(lrs)


SUPPORTED = [
    (implementation.value, stage, ordering.value)
    for (implementation, stage), orderings in SUPPORTED_ORDERINGS.items()
    for ordering in sorted(orderings)
]


@pytest.mark.parametrize(("implementation", "stage", "ordering"), SUPPORTED)
def test_every_combination_that_the_contract_offers_trains(
    ranks: Gang, implementation: str, stage: int, ordering: str
) -> None:
    spec = {"implementation": implementation, "zero_stage": stage, "step_ordering": ordering, "steps": 3}
    run = rank_0(ranks, {**spec, "loss_scale": {"initial_power": 0}})

    assert run["error"] is None
    assert run["final"]["muon_parameters_moved"] == run["final"]["muon_parameters_total"] == 5


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_other_precisions_train_too(ranks: Gang, precision: str, stage: int) -> None:
    run = rank_0(ranks, {"precision": precision, "zero_stage": stage, "steps": 3})

    assert run["error"] is None
    assert run["final"]["parameters_moved"] == 10


def test_one_record_counts_over_all_ranks(ranks: Gang) -> None:
    run = rank_0(ranks, {"task": {"name": "byte_gpt"}, "steps": 2, "gradient_accumulation_steps": 2})
    record = run["records"][1]

    # 2 ranks x 2 micro-batches x 4 samples x 64 bytes; 12 matrices, each orthogonalized once.
    assert record["tokens"] == 1024
    assert record["ns_calls"] == 12
    assert record["nonfinite_parameters"] == 0
    assert record["update_norm"] > 0


def test_all_zero_stages_record_the_same_losses(ranks: Gang) -> None:
    losses = [
        [record["loss"] for record in rank_0(ranks, {**THIRTY, "zero_stage": stage})["records"]] for stage in (1, 2, 3)
    ]

    assert losses[0] == losses[1] == losses[2]


def test_only_rank_zero_needs_to_keep_records_but_all_agree_on_them(ranks: Gang) -> None:
    first, second = ranks.run_once(run_spec, spec=CALM_BOOM)

    assert first["final"] == second["final"]
    assert [r["momentum_norm"] for r in first["records"]] == [r["momentum_norm"] for r in second["records"]]


@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_a_planted_gradient_overflows_exactly_its_step(ranks: Gang, kind: str) -> None:
    fault = {"kind": kind, "step": 2, "rank": 1, "micro_batch": 1, "parameter": "linears.3.weight"}
    run = rank_0(
        ranks,
        {"steps": 5, "gradient_accumulation_steps": 2, "loss_scale": {"initial_power": 0}, "faults": [fault]},
    )

    assert [record["step"] for record in run["records"] if record["overflow"]] == [2] or run["attempting"] == 2


def test_a_planted_loss_reaches_the_recorded_loss(ranks: Gang) -> None:
    fault = {"kind": "nan", "step": 1, "rank": 1}
    run = rank_0(ranks, {"steps": 3, "loss_scale": {"initial_power": 4}, "faults": [fault]})

    assert [math.isnan(record["loss"]) for record in run["records"]] == [False, True, False]
    assert [record["discarded"] for record in run["records"]] == [False, True, False]


def test_a_fault_in_a_parameter_that_does_not_exist_is_refused_with_its_name(ranks: Gang) -> None:
    fault = {"kind": "inf", "step": 0, "parameter": "nowhere.weight"}
    name, text = ranks.run(build_error, spec={"faults": [fault]})[0]

    assert name == "ConfigRefused"
    assert "nowhere.weight" in text
    assert "linears.0.weight" in text


def test_discarded_steps_in_a_row_end_a_run_that_asks_for_it(ranks: Gang) -> None:
    run = rank_0(ranks, {**THIRTY, "step_ordering": "master", "stop_after_discarded_steps": 5})

    assert run["error"] == "NoProgress"
    assert len(run["records"]) == 5
    assert run["attempting"] == 4


def test_a_static_loss_scale_stays(ranks: Gang) -> None:
    run = rank_0(ranks, {"steps": 3, "loss_scale": {"static": 8.0}})

    assert {record["loss_scale_before"] for record in run["records"]} == {8.0}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        # A known key with a text: which texts it takes, only DeepSpeed knows.
        ({"ds_config": {"communication_data_type": "fp7"}}, "fp7"),
        ({"deepspeed": {"version": "0.19.2"}, "step_ordering": "master"}, "0.19.2"),
    ],
)
def test_what_deepspeed_will_not_run_is_refused_with_the_reason(ranks: Gang, spec: dict[str, Any], reason: str) -> None:
    error = ranks.run(build_error, spec=spec)[0]

    assert error is not None
    assert error[0] == "ConfigRefused"
    assert reason in error[1]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("implementation", ["muon_core", "deepspeed"])
def test_a09_a_model_of_which_nothing_trains_is_refused_on_every_rank(
    ranks: Gang, implementation: str, stage: int
) -> None:
    task = {"name": "tests.faults.tasks:frozen"}
    ordering = {"muon_core": "ordered", "deepspeed": "deferred"}[implementation]
    spec = {"task": task, "implementation": implementation, "step_ordering": ordering, "zero_stage": stage}

    errors = ranks.run(build_error, spec=spec)

    assert (
        errors == [("ConfigRefused", "the task's model has no trainable parameter; there is nothing to optimize")] * 2
    )


def test_a_raw_config_is_merged_key_by_key(ranks: Gang) -> None:
    spec = {"zero_stage": 2, "ds_config": {"zero_optimization": {"overlap_comm": False}, "wall_clock_breakdown": False}}
    config = ranks.run(resolved_config, spec=spec)[0]

    assert config["zero_optimization"] == {"stage": 2, "reduce_scatter": False, "overlap_comm": False}
    assert config["gradient_clipping"] == 0.0


@pytest.mark.acceptance
def test_byte_gpt_learns_and_master_dies_of_a_high_initial_scale(ranks: Gang) -> None:
    task = {"task": {"name": "byte_gpt"}, "steps": 60}
    learns = rank_0(ranks, task)["records"]
    dies = rank_0(ranks, {**task, "step_ordering": "master", "loss_scale": {"initial_power": 24}})
    lives = rank_0(ranks, {**task, "loss_scale": {"initial_power": 24}})

    first, last = ([record["loss"] for record in part] for part in (learns[:5], learns[-5:]))
    assert sum(last) / 5 < 0.7 * sum(first) / 5
    assert dies["error"] == "LossScaleExhausted"
    assert dies["final"]["parameters_moved"] == 0
    assert lives["error"] is None
    assert lives["final"]["parameters_moved"] == lives["final"]["parameters_total"]
    assert any(record["discarded"] for record in lives["records"])
