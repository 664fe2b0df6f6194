import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.analysis.downsampling import thin
from service.columns import kind_lengths, kinds_of, mask_kinds, norms_matrix, restore, run_lengths
from tests.unit.analysis.columns import columns


@given(st.lists(st.booleans(), max_size=40))
def test_run_lengths_cover_exactly_the_true_flags(flags: list[bool]) -> None:
    runs = run_lengths(np.array(flags, np.bool_), np.arange(len(flags)))

    assert [step for first, last in runs for step in range(first, last + 1)] == list(np.flatnonzero(flags))
    assert all(second[0] > first[1] + 1 for first, second in itertools.pairwise(runs))


def test_a_gap_in_the_steps_breaks_a_run() -> None:
    assert run_lengths(np.array([True, True, True]), np.array([3, 4, 9])) == [(3, 4), (9, 9)]


def test_neighbouring_kinds_are_runs_of_their_own() -> None:
    kinds = kinds_of(np.array([math.nan, math.nan, math.inf, -math.inf, 1.0]))
    assert kind_lengths(kinds, np.arange(5)) == [(0, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_masks_and_nulls_give_the_values_back() -> None:
    stored = np.array([math.nan, math.nan, math.nan, math.nan, 2.0])
    values, measured = restore(stored, mask_kinds(np.array([0, 1 << 4, 2 << 4, 3 << 4, 0]), 2))

    assert measured.tolist() == [False, True, True, True, True]
    assert np.array_equal(values, [math.nan, math.nan, math.inf, -math.inf, 2.0], equal_nan=True)


def test_norms_of_unequal_rows_are_no_matrix() -> None:
    assert norms_matrix([b"\0" * 4, b"\0" * 8]) is None
    matrix = norms_matrix([b"\0" * 8, b"\0" * 8])
    assert matrix is not None
    assert matrix.shape == (2, 2)


@given(
    st.lists(st.one_of(st.none(), st.floats(width=32)), min_size=4, max_size=200),
    st.integers(2, 50),
)
def test_thinning_keeps_the_extremes_and_the_ends(loss: list[float | None], max_points: int) -> None:
    whole = columns(len(loss), loss=loss)
    steps, series = thin(whole, max_points)
    values, present = series["loss"]
    finite = [value for value in loss if value is not None and math.isfinite(value)]

    assert len(steps) == len(values) <= max(max_points, 2)
    assert (steps[0], steps[-1]) == (0, len(loss) - 1)
    assert np.all(np.diff(steps) >= 0)
    assert np.isfinite(values[present]).all()
    if finite:
        assert (values[present].min(), values[present].max()) == (min(finite), max(finite))
    else:
        assert not present.any()


def test_thinning_keeps_the_order_in_which_extremes_occur() -> None:
    _, series = thin(columns(4, loss=[1.0, 9.0, 9.0, 1.0]), 4)
    assert series["loss"][0].tolist() == [1.0, 9.0, 9.0, 1.0]
