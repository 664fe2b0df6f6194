"""What the built-in experiments are known to show."""

import pytest

from muonscope.contract.published import BYTE_GPT, THIRTY_STEP, published_result
from muonscope.contract.run_spec import LossScale, RunSpec
from muonscope.contract.status import Precision, StepOrdering, Verdict


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
