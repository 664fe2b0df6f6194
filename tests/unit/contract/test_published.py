"""What the built-in experiments are known to show."""

import json
import math
from pathlib import Path

import pytest

from muonscope.contract.published import (
    BYTE_GPT,
    THIRTY_STEP,
    accumulation_figures,
    calm_boom_norms,
    published_result,
)
from muonscope.contract.run_spec import LossScale, RunSpec
from muonscope.contract.status import Implementation, Precision, StepOrdering, Verdict

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "deepspeed.json").read_text())
NATIVE, OURS = Implementation.DEEPSPEED, Implementation.MUON_CORE


def spec(ordering: StepOrdering, power: int, **changes: object) -> RunSpec:
    return RunSpec(step_ordering=ordering, loss_scale=LossScale(initial_power=power), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 2])
def test_master_at_65536_is_published_as_dead_with_nothing_moved(stage: int) -> None:
    published = published_result(THIRTY_STEP, spec(StepOrdering.MASTER, 16, zero_stage=stage))

    assert published is not None
    assert (published.verdict, published.verdict_step, published.overflows) == (Verdict.DIES, 17, 17)
    assert (published.parameters_moved, published.parameters_total, published.momentum_finite) == (0, 10, False)
    assert published.most_weight_motion == 0.0


@pytest.mark.parametrize(("ordering", "power"), [("ordered", 16), ("ordered", 0), ("master", 0)])
def test_everything_else_of_the_thirty_steps_is_published_as_training(ordering: str, power: int) -> None:
    published = published_result(THIRTY_STEP, spec(StepOrdering(ordering), power))

    assert published is not None
    assert (published.verdict, published.parameters_moved, published.momentum_finite) == (Verdict.TRAINS, 10, True)
    assert published.least_weight_motion > 1e-5


def test_byte_gpt_is_known_by_its_verdict_alone() -> None:
    dies = published_result(BYTE_GPT, spec(StepOrdering.MASTER, 16))
    trains = published_result(BYTE_GPT, spec(StepOrdering.ORDERED, 16))

    assert dies is not None
    assert trains is not None
    assert (dies.verdict, dies.overflows, trains.verdict) == (Verdict.DIES, None, Verdict.TRAINS)


def test_without_fp16_no_scale_can_kill() -> None:
    published = published_result(BYTE_GPT, spec(StepOrdering.MASTER, 16, precision=Precision.BF16))

    assert published is not None
    assert published.verdict is Verdict.TRAINS


@pytest.mark.parametrize("name", [None, "", "mine"])
def test_of_other_experiments_nothing_is_known(name: str | None) -> None:
    assert published_result(name, RunSpec()) is None


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("ordering", [name for name in StepOrdering if name != "ordered"])
def test_deepspeeds_norms_are_the_golden_ones(ordering: StepOrdering) -> None:
    golden = [row["after_step"] for row in GOLDEN["orderings"][f"z1_{ordering}"]["rows"]]
    norms = calm_boom_norms(NATIVE, ordering)

    assert all(same(a, b) for step in range(3) for a, b in zip(norms[step], golden[step], strict=True))


def test_our_norms_are_the_golden_ones_of_float32_momentum_in_unscaled_units() -> None:
    golden = [row["after_step"] for row in GOLDEN["orderings"]["z1_ordered_fp32"]["rows"]]

    assert [list(step) for step in calm_boom_norms(OURS, StepOrdering.ORDERED)] == golden[:3]
    # Every ordering moves by the same numbers; they differ in when.
    assert calm_boom_norms(OURS, StepOrdering.PER_TENSOR)[1:] == (
        (golden[2][0], golden[0][1]),
        (golden[3][0], golden[2][1]),
    )


def test_the_accumulation_figures_are_the_golden_ones() -> None:
    (early,) = [case for case in GOLDEN["gradient_accumulation"]["0.19.2"] if case["stage"] == 3]
    (late,) = [case for case in GOLDEN["gradient_accumulation"]["0.19.8"] if case["stage"] == 3]
    master = accumulation_figures(OURS, StepOrdering.MASTER)
    deferred = accumulation_figures(NATIVE, StepOrdering.DEFERRED)

    assert master is not None
    assert deferred is not None
    assert (master.ns_calls, master.distance) == (early["calls_gas4_2steps"], early["rel"])
    assert (deferred.ns_calls, deferred.distance) == (late["calls_gas4_2steps"], late["rel"])
