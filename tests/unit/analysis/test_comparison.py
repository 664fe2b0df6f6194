import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from muonscope.contract.status import MomentumUnit
from service.analysis.comparison import Side, compare, differing_parameters, first_divergence, spec_difference
from tests.unit.analysis.columns import columns

NAN = math.nan


def side(num_steps: int = 4, spec: dict[str, Any] | None = None, **series: Any) -> Side:
    return Side(spec or {"step_ordering": "ordered"}, columns(num_steps, **series), MomentumUnit.UNSCALED)


def test_equal_records_never_diverge_and_nan_is_equal_to_itself() -> None:
    one, other = (side(loss=[1.0, NAN, None, 2.0]) for _ in range(2))
    assert first_divergence(one, other) is None
    assert compare(one, other)["bit_equal_until"] == 4


@pytest.mark.parametrize(
    ("changed", "step", "scalars"),
    [
        ({"loss": [1.0, 1.0, math.nextafter(1.0, 2.0), 1.0]}, 2, ("loss",)),
        ({"momentum_norm": [1.0, NAN, 1.0, 1.0]}, 1, ("momentum_norm",)),
        ({"grad_norm": [1.0, 2.0, 1.0, 1.0], "update_norm": [1.0, 2.0, 1.0, 1.0]}, 1, ("grad_norm", "update_norm")),
        ({"discarded": [3]}, 3, ("overflow", "discarded")),
        ({"loss": [1.0, 1.0, 1.0, 2.0], "lr": [1.0, 2.0, 1.0, 1.0]}, 1, ("lr",)),
    ],
)
def test_the_first_step_that_is_not_bit_equal_is_found(
    changed: dict[str, Any], step: int, scalars: tuple[str, ...]
) -> None:
    divergence = first_divergence(side(), side(**changed))
    assert divergence is not None
    assert (divergence.step, divergence.scalars) == (step, scalars)


@pytest.mark.parametrize("changed", [{"step_time_s": [9.0] * 4}, {"ns_calls": [9] * 4}, {"loss": [None] * 4}])
def test_what_costs_or_was_not_measured_is_no_divergence(changed: dict[str, Any]) -> None:
    assert first_divergence(side(), side(**changed)) is None


def test_what_another_optimizer_takes_is_named_and_what_one_model_lacks_is_not() -> None:
    taken = {"embed": "muon", "w": "muon", "b": "adamw", "only_here": "muon"}
    one, other = replace(side(), routes=taken), replace(side(), routes={"b": "adamw", "w": "muon", "embed": "adamw"})

    assert compare(one, other)["routes"] == {
        "num_differing": 1,
        "differing": [{"parameter": "embed", "a": "muon", "b": "adamw"}],
    }
    assert compare(one, one)["routes"] == {"num_differing": 0, "differing": []}
    assert compare(one, side())["routes"] is None


def test_the_first_hundred_parameters_of_another_optimizer_are_listed_and_all_are_counted() -> None:
    one, other = (replace(side(), routes={f"w{n}": route for n in range(150)}) for route in ("muon", "frozen"))

    routes = compare(one, other)["routes"]

    assert (routes["num_differing"], len(routes["differing"])) == (150, 100)
    assert routes["differing"][99] == {"parameter": "w99", "a": "muon", "b": "frozen"}


def test_norms_in_two_units_are_not_compared() -> None:
    scaled = Side({}, columns(4, momentum_norm=[16.0] * 4), MomentumUnit.LOSS_SCALED)
    assert first_divergence(side(), scaled) is None


def test_a_record_that_ends_early_is_equal_until_there() -> None:
    divergence = first_divergence(side(3), side(5))
    answer = compare(side(3), side(5))

    assert divergence is not None
    assert (divergence.step, divergence.is_end) == (3, True)
    assert (answer["bit_equal_until"], answer["first_divergence"]) == (3, None)
    assert "ends before step 3" in answer["explanation"]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_records_without_a_common_step_are_not_called_equal(lengths: tuple[int, int]) -> None:
    answer = compare(side(lengths[0]), side(lengths[1]))

    assert "equal" not in answer["explanation"]
    assert "no step in common" in answer["explanation"]


def test_records_of_equal_length_with_different_gaps_are_not_called_equal() -> None:
    one = side(3)
    other = replace(one, columns=replace(one.columns, step=np.array([0, 1, 3])))

    divergence = first_divergence(one, other)

    assert divergence is not None
    assert (divergence.step, divergence.is_end) == (2, True)


@pytest.mark.parametrize(
    ("held", "step", "said"),
    [
        ([0, 1, 2, 5, 6, 7], 3, "one of them lacks step 3."),
        ([2, 3, 4, 5, 6, 7], 0, "one of them begins only at step 2."),
        ([0, 1, 2, 3, 4, 5], 6, "until one of them ends before step 6."),
    ],
    ids=["gap", "late begin", "end"],
)
def test_what_one_record_lacks_is_told_as_its_end_only_where_it_ends(held: list[int], step: int, said: str) -> None:
    cut = replace(side(6), columns=replace(columns(6), step=np.array(held)))

    for answer in (compare(cut, side(8)), compare(side(8), cut)):
        assert (answer["bit_equal_until"], answer["first_divergence"]) == (step, None)
        assert answer["explanation"].endswith(said)


def test_specs_differ_by_dotted_name_and_names_do_not_count() -> None:
    one = {"name": "a", "task": {"name": "x", "width": 1}, "seed": 1, "tags": []}
    other = {"name": "b", "task": {"name": "y"}, "seed": 1, "tags": ["t"]}
    assert spec_difference(one, other) == [
        {"field": "task.name", "a": "x", "b": "y"}, {"field": "task.width", "a": 1, "b": None},
    ]  # fmt: skip


def test_recordings_of_adam_alone_that_differ_in_one_setting_are_a_pair() -> None:
    def recorded(rate: float, optimizer: str = "AdamW") -> Side:
        settings = {"lr": rate, "weight_decay": 0.1, "adam": {"lr": rate, "weight_decay": 0.1}}
        return side(4, {"task": {"name": "external", "optimizer": optimizer}, "optimizer": settings})

    answer = compare(recorded(3e-4), recorded(1e-3))

    assert answer["spec_difference"] == [{"field": "optimizer.adam.lr", "a": 3e-4, "b": 1e-3}]
    assert answer["is_pair"]
    # Counter-test: a Muon's rate is its own, whatever Adam's is.
    muons = compare(recorded(3e-4, "Muon"), recorded(1e-3, "Muon"))["spec_difference"]
    assert [entry["field"] for entry in muons] == ["optimizer.lr", "optimizer.adam.lr"]


def test_runs_of_two_tasks_are_said_to_train_different_ones() -> None:
    tasks = [{"task": {"name": name, "width": 1}} for name in ("calm_boom", "matrix_pair", "calm_boom")]
    one, other, same = (side(spec=task, loss=[loss] * 4) for task, loss in zip(tasks, (1.0, 2.0, 3.0), strict=True))

    assert compare(one, other)["explanation"].endswith("The tasks differ: calm_boom and matrix_pair.")
    assert "tasks" not in compare(one, same)["explanation"]


def test_clipping_is_named_as_the_cause_where_no_overflow_is() -> None:
    def clipped(ordering: str, clipping: float, grad_norm: float) -> Side:
        spec = {"step_ordering": ordering, "gradient_clipping": clipping, "implementation": "muon_core"}
        return side(spec=spec, grad_norm=[grad_norm] * 4)

    with_clipping = compare(clipped("master", 1.0, 1.0), clipped("ordered", 1.0, 2.0))["explanation"]
    without = compare(clipped("master", 0.0, 1.0), clipped("ordered", 0.0, 2.0))["explanation"]
    assert "gradient_clipping" in with_clipping
    assert "gradient_clipping" not in without
    assert "step_ordering" in without


@pytest.mark.parametrize(
    ("scales", "is_told"), [((65536.0, 65536.0), True), ((65536.0, 1048576.0), False)], ids=["one scale", "two scales"]
)
def test_a_discarded_step_is_blamed_only_where_nothing_before_it_differs(
    scales: tuple[float, float], is_told: bool
) -> None:
    one, other = (
        side(
            spec={"loss_scale": {"initial_power": scale}},
            discarded=[0],
            loss_scale_before=[scale] * 4,
            momentum_norm=[norm, 1.0, 1.0, 1.0],
        )
        for scale, norm in zip(scales, (0.0, math.inf), strict=True)
    )

    explanation = compare(one, other)["explanation"]

    assert ("what it left in the momentum differs" in explanation) is is_told
    assert ("the specs differ in loss_scale" in explanation) is not is_told


@pytest.mark.parametrize(
    "changed", [{"grad_norm": [NAN, 1.0, 1.0, 1.0]}, {"loss_scale_after": [2.0, 1.0, 1.0, 1.0]}], ids=["norm", "scale"]
)
def test_the_momentum_is_not_blamed_where_it_is_equal(changed: dict[str, Any]) -> None:
    explanation = compare(side(discarded=[0], grad_norm=[math.inf, 1.0, 1.0, 1.0]), side(discarded=[0], **changed))

    assert "momentum" not in explanation["explanation"]


def test_differing_parameters_come_with_the_largest_difference_first() -> None:
    one, other = array("f", [1.0, 2.0, NAN, 4.0]).tobytes(), array("f", [1.5, 2.0, NAN, 9.0]).tobytes()
    assert differing_parameters(one, other) == [3, 0]
    assert differing_parameters(one, b"") == []


def test_costs_are_a_ratio_without_the_first_steps_set_up() -> None:
    slow = side(step_time_s=[9.0, 2.0, 2.0, 2.0])
    answer = compare(side(), slow)["cost"]["step_time_s"]
    assert answer == {"a": 1.0, "b": 2.0, "ratio": 2.0}


def test_calls_are_no_ratio_where_one_run_attempted_more_steps() -> None:
    short, long = side(2, ns_calls=[4] * 2), side(4, ns_calls=[4] * 4)

    assert compare(short, long)["cost"]["ns_calls"] == {"a": 8, "b": 16, "ratio": None}
    assert compare(long, side(4, ns_calls=[1] * 4))["cost"]["ns_calls"] == {"a": 16, "b": 4, "ratio": 0.25}


def test_a_scale_that_stays_infinite_does_not_change() -> None:
    boundless = side(loss_scale_before=[math.inf] * 4, loss_scale_after=[math.inf] * 4)
    assert compare(boundless, side())["loss_scale"]["a"]["num_changes"] == 0


def test_a_scale_is_told_by_its_changes() -> None:
    falling = side(loss_scale_before=[8.0, 8.0, 4.0, 2.0], loss_scale_after=[8.0, 4.0, 2.0, 1.0])
    assert compare(falling, side())["loss_scale"]["a"] == {
        "initial": 8.0, "final": 1.0, "lowest": 1.0, "highest": 8.0,
        "num_changes": 3, "changes": [[2, 4.0], [3, 2.0], [4, 1.0]],
    }  # fmt: skip
    # Counter-test: a last step that leaves it alone is no change.
    steady = side(loss_scale_before=[8.0, 8.0, 4.0, 4.0], loss_scale_after=[8.0, 4.0, 4.0, 4.0])
    assert compare(steady, side())["loss_scale"]["a"]["changes"] == [[2, 4.0]]
