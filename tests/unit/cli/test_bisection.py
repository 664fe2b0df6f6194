"""The search for changes, against answers whose changes are known."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonscope.cli.bisection import CellChange, Change, differences, find_changes, is_same, stretches

RELEASES = [f"0.{number}" for number in range(20)]


def search(cells: Sequence[Any], **options: Any) -> tuple[tuple[Change, ...], list[str]]:
    """Find the changes of one cell over `RELEASES`; also what was asked."""
    asked: list[str] = []

    def answer(release: str) -> Mapping[str, Mapping[str, Any]]:
        asked.append(release)
        return {"run": {"outcome": cells[RELEASES.index(release)]}}

    return find_changes(RELEASES, answer, **options), asked


@pytest.mark.parametrize("first_after", [1, 7, 18, 19])
def test_one_change_is_found_with_few_questions(first_after: int) -> None:
    cells = ["dies"] * first_after + ["trains"] * (20 - first_after)
    changes, asked = search(cells)

    (change,) = changes
    assert (change.last_before, change.first_after) == (RELEASES[first_after - 1], RELEASES[first_after])
    assert change.cells == (CellChange("run", "outcome", "dies", "trains"),)
    assert len(asked) == len(set(asked)) <= 7


def test_two_changes_side_by_side_are_two() -> None:
    changes, _ = search(["master"] * 18 + ["stalls", "trains"])

    assert [change.first_after for change in changes] == ["0.18", "0.19"]
    assert stretches(RELEASES, changes) == [("0.0", "0.17"), ("0.18", "0.18"), ("0.19", "0.19")]


def test_ends_that_answer_alike_end_the_search() -> None:
    changes, asked = search(["trains"] * 20)

    assert changes == ()
    assert asked == ["0.0", "0.19"]


@given(st.lists(st.integers(1, 19), min_size=1, max_size=4, unique=True))
def test_changes_that_never_come_back_are_all_found(cuts: list[int]) -> None:
    cells = [str(sum(place >= cut for cut in cuts)) for place in range(20)]

    changes, asked = search(cells)

    assert [change.first_after for change in changes] == [RELEASES[cut] for cut in sorted(cuts)]
    assert len(asked) == len(set(asked))


def test_a_run_that_one_release_does_not_offer_is_a_change() -> None:
    assert differences({}, {"stage 3": {"outcome": "trains", "calls": 16}}) == (
        CellChange("stage 3", "outcome", "not offered", "trains"),
    )


def test_only_the_columns_that_count_are_compared() -> None:
    before = {"run": {"verdict": "trains", "outcome": "trains", "overflows": 0}}
    after = {"run": {"verdict": "trains", "outcome": "trains", "overflows": 2}}

    assert differences(before, after, ["verdict"]) == ()
    assert [cell.column for cell in differences(before, after)] == ["overflows"]


def test_the_verdict_counts_once_beside_the_outcome_that_says_it() -> None:
    before, after = ({"run": {"verdict": word, "outcome": word}} for word in ("dies", "trains"))

    assert [cell.column for cell in differences(before, after)] == ["outcome"]
    assert [cell.column for cell in differences(before, after, ["verdict"])] == ["verdict"]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (0.455, 0.457, True),
        (9.5e-5, 0.43, False),
        (0.0, 1e-9, False),
        (1.0, -1.0, False),
        (1e-200, 1e-200, True),
        (1e200, -1e200, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (17, 16, False),
        (True, False, False),
        (None, 0.0, False),
        ("dies at step 17", "dies at step 16", False),
        ("16 calls in two steps, 0.1349 from one batch", "16 calls in two steps, 0.1337 from one batch", True),
        ("16 calls in two steps, 0.1337 from one batch", "4 calls in two steps, 0.000418 from one batch", False),
        ("4 calls, 0.05102 from one batch", "4 calls, 0.000464 from one batch", False),
        ("NaN", "NaN", True),
    ],
)
def test_counts_are_compared_exactly_and_measurements_as_a_reader_would(before: Any, after: Any, same: bool) -> None:
    assert is_same(before, after) is same
    assert is_same(after, before) is same
