import math
from typing import Any

import pytest

from service.analysis.comparison import Side, compare
from service.analysis.learning import caveat, learned, lower_to_the_end
from tests.unit.analysis.columns import columns

NAN, INF = math.nan, math.inf


def test_losses_are_summed_up_by_the_last_the_lowest_and_the_mean_of_the_last_tenth() -> None:
    losses = [float(20 - step) for step in range(18)] + [5.0, 7.0]

    assert learned(columns(20, loss=losses)) == {
        "last": 7.0, "lowest": 3.0, "lowest_step": 17, "mean_of_last": 6.0, "mean_of_last_steps": 2,
    }  # fmt: skip


def test_discarded_steps_are_no_part_of_the_mean_and_non_finite_losses_are_never_the_lowest() -> None:
    found = learned(columns(4, loss=[2.0, NAN, 1.0, -INF], discarded=[3]))

    assert (found["last"], found["lowest"], found["lowest_step"], found["mean_of_last"]) == ("-Infinity", 1.0, 2, 1.0)


@pytest.mark.parametrize(
    ("losses", "mean"), [([INF, -INF], "NaN"), ([1e308, 1e308], "Infinity"), ([INF, 1.0], "Infinity")]
)
def test_a_mean_that_is_no_number_is_told_as_what_it_is(losses: list[float], mean: str) -> None:
    assert learned(columns(20, loss=[1.0] * 18 + losses))["mean_of_last"] == mean


@pytest.mark.parametrize("losses", [[], [None, None]])
def test_a_record_without_losses_has_nothing_to_sum_up(losses: list[float | None]) -> None:
    assert set(learned(columns(len(losses), loss=losses)).values()) == {None, 0}
    assert lower_to_the_end(columns(len(losses), loss=losses), columns(2)) is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], ("b", 1, 3)),
        ([1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0], ("a", 2, 3)),
        ([3.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 0.5], ("b", 3, 3)),
        ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], ("a", 0, 3)),
        ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, NAN, INF], ("a", 0, 3)),
        ([1.0, 0.0, 1.0, None], [2.0, 2.0, 2.0, 0.0], ("a", 0, 2)),
    ],
    ids=["crosses once", "crosses after equal", "only at the end", "always", "above where not finite", "not measured"],
)
def test_the_step_is_found_from_which_one_loss_stays_below_the_other(
    a: list[float | None], b: list[float | None], expected: tuple[str, int, int]
) -> None:
    found = lower_to_the_end(columns(4, loss=a), columns(4, loss=b))

    assert found is not None
    assert (found["side"], found["from_step"], found["until_step"]) == expected


def test_a_longer_record_is_held_against_the_steps_that_both_have() -> None:
    found = lower_to_the_end(columns(2, loss=[1.0, 1.0]), columns(4, loss=[2.0, 2.0, 0.0, 0.0]))

    assert found == {"side": "a", "from_step": 0, "until_step": 1}


@pytest.mark.parametrize("losses", [[2.0, 1.0], [2.0, NAN]])
def test_neither_is_lower_where_the_last_losses_are_equal_or_both_not_finite(losses: list[float]) -> None:
    assert lower_to_the_end(columns(2, loss=[1.0, losses[1]]), columns(2, loss=losses)) is None


@pytest.mark.parametrize(
    ("task", "other", "is_same_data", "word"),
    [
        ("byte_gpt", "byte_gpt", False, "data differ"),
        ("byte_gpt", "byte_gpt", None, "not recorded"),
        ("byte_gpt", "calm_boom", True, "tasks differ"),
    ],
)
def test_a_loss_on_other_data_comes_with_the_sentence_that_says_so(
    task: str, other: str, is_same_data: bool | None, word: str
) -> None:
    assert word in (caveat({"task": {"name": task}}, {"task": {"name": other}}, is_same_data) or "")
    assert caveat({"task": {"name": task}}, {"task": {"name": task}}, True) is None


def test_a_comparison_says_which_run_learned_better() -> None:
    def run(lr: float, **more: Any) -> Side:
        return Side({"optimizer": {"lr": lr}}, columns(2, loss=[1.0, lr]), data_hash="d", **more)

    assert compare(run(0.5), run(0.25))["learning"] == {
        "a": {"last": 0.5, "lowest": 0.5, "lowest_step": 1, "mean_of_last": 0.5, "mean_of_last_steps": 1},
        "b": {"last": 0.25, "lowest": 0.25, "lowest_step": 1, "mean_of_last": 0.25, "mean_of_last_steps": 1},
        "lower": {"side": "b", "from_step": 1, "until_step": 1},
        "caveat": None,
    }


def test_the_lowest_loss_is_an_applied_steps() -> None:
    losses = [3.0, 0.5, 2.0]

    found = learned(columns(3, loss=losses, discarded=[1]))

    assert (found["lowest"], found["lowest_step"]) == (2.0, 2)
    # Counter-test: applied, the same step is the lowest; and where none was applied there is none.
    assert learned(columns(3, loss=losses))["lowest_step"] == 1
    assert learned(columns(3, loss=losses, discarded=[0, 1, 2]))["lowest"] is None
