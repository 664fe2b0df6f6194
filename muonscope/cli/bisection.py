"""The search for the releases in which an experiment's answer changed: which to try next, and what differs. Pure.

A change lies between two releases that follow each other and answer differently. The search halves every stretch whose
ends differ, so it finds several changes; where both ends of a stretch answer alike, what may have come and gone between
them is not looked for.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

Row = Mapping[str, Any]
"""One run's cells by column, as the service's table has them."""
Answer = Mapping[str, Row]
"""A release's rows by the run's name."""

OUTCOME: Final = "outcome"
VERDICT: Final = "verdict"
NOT_OFFERED: Final = "not offered"
# Two releases round differently; what a reader would call another figure is further apart.
SAME_WITHIN: Final = 2.0
_MEASUREMENT: Final = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")


@dataclass(frozen=True, slots=True)
class CellChange:
    """What one run shows before a change and after it."""

    run: str
    column: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Change:
    """Two releases that follow each other, and the cells in which they differ."""

    last_before: str
    first_after: str
    cells: tuple[CellChange, ...]


def find_changes(
    releases: Sequence[str], answer: Callable[[str], Answer], columns: Sequence[str] | None = None
) -> tuple[Change, ...]:
    """Ask as few releases as it takes; returns the changes, oldest first.

    Args:
        releases: in order, oldest first, two or more.
        answer: tries one release; asked once for each at most.
        columns: those that count; None for all of a row's.
    """
    known: dict[int, Answer] = {}

    def ask(place: int) -> Answer:
        if place not in known:
            known[place] = answer(releases[place])
        return known[place]

    def search(low: int, high: int) -> Iterator[Change]:
        cells = differences(ask(low), ask(high), columns)
        if not cells:
            return
        if high - low == 1:
            yield Change(releases[low], releases[high], cells)
            return
        middle = (low + high) // 2
        yield from search(low, middle)
        yield from search(middle, high)

    return tuple(search(0, len(releases) - 1))


def differences(before: Answer, after: Answer, columns: Sequence[str] | None = None) -> tuple[CellChange, ...]:
    """Return the cells in which two answers differ; a run that one of them does not offer is one such cell."""
    found = []
    for run in dict.fromkeys((*before, *after)):
        one, two = before.get(run), after.get(run)
        if one is None or two is None:
            found.append(CellChange(run, OUTCOME, _outcome(one), _outcome(two)))
            continue
        for column in dict.fromkeys((*one, *two)):
            # By default whatever a row has: its outcome says the verdict already.
            counts = column in columns if columns is not None else column != VERDICT
            if counts and not is_same(one.get(column), two.get(column)):
                found.append(CellChange(run, column, one.get(column), two.get(column)))
    return tuple(found)


def is_same(before: Any, after: Any) -> bool:
    """Whether two cells say the same: counts and words exactly, measured numbers within a factor of two."""
    if isinstance(before, float) and isinstance(after, float):
        return _is_near(before, after)
    if isinstance(before, str) and isinstance(after, str):
        if _MEASUREMENT.sub("#", before) != _MEASUREMENT.sub("#", after):
            return False
        numbers = (map(float, _MEASUREMENT.findall(text)) for text in (before, after))
        return all(_is_near(one, two) for one, two in zip(*numbers, strict=True))
    return bool(before == after)


def stretches(releases: Sequence[str], changes: Sequence[Change]) -> list[tuple[str, str]]:
    """Return the first and last release of each stretch between changes."""
    cuts = [releases.index(change.first_after) for change in changes]
    return [(releases[start], releases[end - 1]) for start, end in pairwise([0, *cuts, len(releases)])]


def _is_near(before: float, after: float) -> bool:
    if not (math.isfinite(before) and math.isfinite(after)) or before == 0 or after == 0:
        return before == after or (math.isnan(before) and math.isnan(after))
    return (before > 0) == (after > 0) and 1 / SAME_WITHIN < before / after < SAME_WITHIN


def _outcome(row: Row | None) -> Any:
    return NOT_OFFERED if row is None else row.get(OUTCOME)
