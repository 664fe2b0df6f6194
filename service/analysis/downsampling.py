"""Series thinned for a chart: each bucket keeps its smallest and largest value, so that no spike is lost. Pure."""

from typing import Final

import numpy as np

from service.columns import Flags, Floats, Integers, Outline, StepColumns, extremes

EXACT_UP_TO: Final = 20_000
"""Steps up to which a series is never thinned."""

Thinned = tuple[Integers, dict[str, tuple[Floats, Flags]]]
"""The steps, two a bucket, and for each series (values, whether there is one)."""


def thin(columns: StepColumns, max_points: int) -> Thinned:
    """Reduce columns to at most `max_points` points.

    Every series keeps two values a bucket: its smallest and largest finite one, in the order they occur. Both series
    and bucket ends share the steps returned. Values that are not finite are left out here: their run lengths say
    exactly where they are.

    Args:
        columns: at least as many steps as points.
        max_points: 2 or more.
    Returns:
        The first and last step of each bucket, and the series.
    """
    starts, stops = _buckets(len(columns), max_points)
    return _shown(columns.step[starts], columns.step[stops - 1], columns.values, starts)


def thin_outline(outline: Outline, max_points: int) -> Thinned:
    """Do the same with a record that is summed up already: its buckets become fewer, or stay as they are."""
    starts, stops = _buckets(len(outline.first), max_points)
    points = {name: pairs.reshape(-1) for name, pairs in outline.values.items()}
    return _shown(outline.first[starts], outline.last[stops - 1], points, 2 * starts)


def _buckets(count: int, max_points: int) -> tuple[Integers, Integers]:
    bounds = np.linspace(0, count, min(max_points // 2, count) + 1).astype(np.int64)
    return bounds[:-1], bounds[1:]


def _shown(first: Integers, last: Integers, values: dict[str, Floats], starts: Integers) -> Thinned:
    steps = np.stack((first, last), axis=1).reshape(-1)
    names = list(values)
    pairs = extremes(np.stack([values[name] for name in names]), starts).reshape(len(names), -1)
    return steps, {name: (row, np.isfinite(row)) for name, row in zip(names, pairs, strict=True)}
