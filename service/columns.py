"""Steps as columns: what the store reads and the analysis judges, non-finite and missing values apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

FINITE: Final = 0
NAN: Final = 1
PLUS_INFINITY: Final = 2
MINUS_INFINITY: Final = 3
KIND_NAMES: Final = {NAN: "NaN", PLUS_INFINITY: "Infinity", MINUS_INFINITY: "-Infinity"}
_KIND_VALUES: Final = np.array([0.0, np.nan, np.inf, -np.inf])


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A run's steps in order, one array a field.

    `values` holds NaN and the infinities as themselves; where a value was not measured it holds NaN and `measured`
    is False.
    """

    step: Integers
    attempt: Integers
    overflow: Flags
    discarded: Flags
    values: dict[str, Floats] = field(default_factory=dict)
    measured: dict[str, Flags] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def kinds(self, name: str) -> Integers:
        """Say of each value whether it is non-finite and how; what was not measured counts as finite."""
        return np.where(self.measured[name], kinds_of(self.values[name]), FINITE)


@dataclass(frozen=True, slots=True)
class Marks:
    """Which of these steps overflowed, were discarded, and where values were not finite (kinds by scalar)."""

    step: Integers
    overflow: Flags
    discarded: Flags
    kinds: dict[str, Integers]

    @classmethod
    def of(cls, columns: StepColumns) -> Self:
        return cls(
            columns.step, columns.overflow, columns.discarded, {name: columns.kinds(name) for name in columns.values}
        )


@dataclass(frozen=True, slots=True)
class Outline:
    """A long record summed up for a chart: the extremes of buckets of steps, and exactly where it was not plain."""

    first: Integers
    last: Integers
    """First and last step of each bucket."""
    values: dict[str, Floats]
    """(buckets, 2): smallest and largest finite value in the order they occur, NaN where there is none."""
    marks: Marks
    """Of all steps that are not plain, in order, and of some that are."""


def kinds_of(values: NDArray[np.floating]) -> Integers:
    """Classify each number: FINITE, NAN, PLUS_INFINITY or MINUS_INFINITY."""
    kinds = np.zeros(values.shape, np.int64)
    kinds[np.isnan(values)] = NAN
    kinds[np.isposinf(values)] = PLUS_INFINITY
    kinds[np.isneginf(values)] = MINUS_INFINITY
    return kinds


def restore(stored: Floats, kinds: Integers) -> tuple[Floats, Flags]:
    """Undo the storage of one scalar: NULLs read as NaN, and the row's two bits for it.

    Returns:
        The values, and which of them were measured.
    """
    nonfinite = kinds != FINITE
    return np.where(nonfinite, _KIND_VALUES[kinds], stored), nonfinite | ~np.isnan(stored)


def extremes(values: Floats, starts: Integers) -> Floats:
    """Return each bucket's smallest and largest finite value, in the order they occur.

    Applied to its own result it widens the buckets without loss.

    Args:
        values: (series, points).
        starts: the first point of each bucket, ascending from 0.
    Returns:
        (series, buckets, 2); NaN where a bucket has no finite value.
    """
    finite = np.isfinite(values)
    low = high = values
    if not finite.all():
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    smallest, largest = np.minimum.reduceat(low, starts, axis=1), np.maximum.reduceat(high, starts, axis=1)
    lengths = np.diff(np.append(starts, values.shape[1]))
    falls = _first_places(high, largest, lengths) < _first_places(low, smallest, lengths)
    pairs = np.stack((np.where(falls, largest, smallest), np.where(falls, smallest, largest)), axis=2)
    pairs[smallest > largest] = np.nan
    return pairs


def _first_places(values: Floats, extreme: Floats, lengths: Integers) -> Integers:
    """Return where each bucket's extreme first occurs, as (series, buckets)."""
    places = np.flatnonzero(values == np.repeat(extreme, lengths, axis=1))
    series, points = np.divmod(places, values.shape[1])
    buckets = series * len(lengths) + np.repeat(np.arange(len(lengths)), lengths)[points]
    first = np.empty(extreme.size, np.int64)
    # Of several assignments to one place the last one stays.
    first[buckets[::-1]] = places[::-1]
    return first.reshape(extreme.shape)


def mask_kinds(masks: Integers, place: int) -> Integers:
    """Take the two bits of the scalar at this place from each row's mask."""
    return (masks >> (2 * place)) & 3


def run_lengths(flags: Flags, steps: Integers) -> list[tuple[int, int]]:
    """Return [first, last] step of each unbroken run of true flags; a gap in the steps breaks a run."""
    if not flags.any():
        return []
    at = np.flatnonzero(flags)
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(steps[at]) != 1))
    firsts = steps[at[np.concatenate(([0], breaks + 1))]]
    lasts = steps[at[np.concatenate((breaks, [len(at) - 1]))]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def kind_lengths(kinds: Integers, steps: Integers) -> list[tuple[int, int, int]]:
    """Return [first, last, kind] of each unbroken run of one non-finite kind, in step order."""
    if not kinds.any():
        return []
    runs = [
        (first, last, kind)
        for kind in (NAN, PLUS_INFINITY, MINUS_INFINITY)
        for first, last in run_lengths(kinds == kind, steps)
    ]
    return sorted(runs)


def norms_matrix(norms: Sequence[bytes]) -> NDArray[np.float32] | None:
    """View packed norms as (steps, parameters), or None where the rows differ in length."""
    if len({len(row) for row in norms}) > 1:
        return None
    return np.frombuffer(b"".join(norms), "<f4").reshape(len(norms), -1)
