"""Series thinned for a chart: each bucket keeps its smallest and largest value, so that no spike is lost. Pure."""

from typing import Final

import numpy as np

from service.columns import Flags, Floats, Integers, StepColumns

EXACT_UP_TO: Final = 20_000
"""Steps up to which a series is never thinned."""


def thin(columns: StepColumns, max_points: int) -> tuple[Integers, dict[str, tuple[Floats, Flags]]]:
    """Reduce columns to at most `max_points` points.

    Every series keeps two values a bucket: its smallest and largest finite one, in the order they occur. Both series
    and bucket ends share the steps returned. Values that are not finite are left out here: their run lengths say
    exactly where they are.

    Args:
        columns: at least as many steps as points.
        max_points: 2 or more.
    Returns:
        The steps (first and last of each bucket), and for each series (values, whether there is one).
    """
    count = len(columns)
    num_buckets = min(max_points // 2, count)
    bounds = np.linspace(0, count, num_buckets + 1).astype(np.int64)
    starts, stops = bounds[:-1], bounds[1:]
    steps = np.stack((columns.step[starts], columns.step[stops - 1]), axis=1).reshape(-1)
    return steps, {name: _extremes(values, starts) for name, values in columns.values.items()}


def _extremes(values: Floats, starts: Integers) -> tuple[Floats, Flags]:
    finite = np.isfinite(values)
    low = np.where(finite, values, np.inf)
    high = np.where(finite, values, -np.inf)
    smallest, largest = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    bucket = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))
    places = np.arange(len(values))
    far = len(values)
    first_low = np.minimum.reduceat(np.where(low == smallest[bucket], places, far), starts)
    first_high = np.minimum.reduceat(np.where(high == largest[bucket], places, far), starts)
    falls = first_high < first_low
    pairs = np.stack((np.where(falls, largest, smallest), np.where(falls, smallest, largest)), axis=1).reshape(-1)
    present = np.repeat(np.logical_or.reduceat(finite, starts), 2)
    return np.where(present, pairs, np.nan), present
