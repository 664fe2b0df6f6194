"""Which queued runs start now, and why the others wait. Pure: numbers in, decisions out.

Order: by rank, which is the time of submission less `aging_s` for each point of priority: first come, first served
within a priority, and whoever has waited `aging_s` longer stands level with one point more. The first run that does
not fit holds the head of the line, and GPUs that come free are kept for it: a stream of small runs cannot starve it.
Only what it will leave over, however it comes by its GPUs, stays open to those behind it. A run that its user's or its
tag's limit holds back is passed by. Once nothing behind the head of the line can start, nothing behind it is looked
at: a tick over a long line reads its beginning.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

# GPU shares are sums of tenths and thirds: a run that fits exactly must not fail on the last bit.
_TOLERANCE: Final = 1e-6
EVERYBODY: Final = "*"
_PLACE: Final = attrgetter("rank", "id")
# The finest share of a GPU that sums of shares are reckoned in.
_UNIT: Final = 0.001
_TURN: Final = "waits for its turn"


class QueuedRun(NamedTuple):
    """A run that wants to start. A tuple: a tick may make ten thousand of them."""

    id: int
    """Grows with the order of submission."""
    gpus: float
    rank: float = 0.0
    """The smallest starts first; equal ones by id."""
    owner: str = ""
    tags: frozenset[str] = frozenset()
    pause_s: float = 0.0
    """What is left of the pause before its next attempt."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run that holds, or is about to hold, GPUs."""

    id: int
    gpus: float
    rank: float = 0.0
    owner: str = ""
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Capacity:
    gpus: float
    """All of the cluster's."""
    foreign_gpus: float = 0.0
    """Held by jobs that are not ours."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most GPUs held at once, by user and by tag; `*` is each one that is not named."""

    users: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, float] = field(default_factory=dict)

    def for_tag(self, tag: str) -> float | None:
        return self.tags.get(tag, self.tags.get(EVERYBODY))

    def for_user(self, user: str) -> float | None:
        return self.users.get(user, self.users.get(EVERYBODY))


@dataclass(frozen=True, slots=True)
class Schedule:
    start: tuple[int, ...] = ()
    """Runs to start now, in order."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Why each other run that was looked at does not start."""
    rest: str | None = None
    """Why all behind `last` do not; None where each was looked at."""
    last: tuple[float, int] | None = None
    """Rank and id of the last run that was looked at; None where none was."""
    has_more: bool = False
    """As many start as were asked for, and others were not looked at."""


class _Held:
    """Who holds how much, as runs are given GPUs."""

    def __init__(self, limits: Limits, running: Iterable[RunningRun]) -> None:
        self._limits = limits
        self._users: Counter[str] = Counter()
        self._tags: Counter[str] = Counter()
        self.is_limited = bool(limits.users or limits.tags)
        for run in running:
            self.add(run)

    def add(self, run: QueuedRun | RunningRun) -> None:
        if self.is_limited:
            # Counter holds what + adds, fractions too.
            self._users[run.owner] += run.gpus  # type: ignore[assignment]
            for tag in run.tags:
                self._tags[tag] += run.gpus  # type: ignore[assignment]

    def refusal(self, run: QueuedRun) -> str | None:
        """Say which limit keeps a run from its GPUs."""
        who = [(run.owner or "nobody", self._users[run.owner], self._limits.for_user(run.owner))]
        who += [(f"tag {tag}", self._tags[tag], self._limits.for_tag(tag)) for tag in sorted(run.tags)]
        for name, held, limit in who:
            if limit is not None and held + run.gpus > limit + _TOLERANCE:
                return f"needs {_count(run.gpus)}, {name} holds {_number(held)} of at most {_number(limit)}"
        return None


def decide_starts(
    line: Iterable[QueuedRun],
    running: Sequence[RunningRun],
    capacity: Capacity | None,
    *,
    smallest: float = 0.0,
    most_starts: int | None = None,
    look: int = 0,
    limits: Limits | None = None,
    closed: str | None = None,
) -> Schedule:
    """Choose what starts now.

    Args:
        line: by rank, then id; read as far as it matters.
        running: every live run of ours.
        smallest: how many GPUs the smallest run of the line takes, where that is known.
        most_starts: of how many starts at once to say; None of all.
        look: how many to look at even where nothing can start any more, for the sake of why they wait.
        capacity: None while the cluster cannot be reached: nothing starts.
        limits: of users and tags; None sets none.
        closed: why nothing may start at all (the queue is paused); None lets runs start.
    """
    if closed is not None:
        return Schedule(rest=closed)
    if capacity is None:
        return Schedule(rest="the Ray cluster is not reachable")
    held = _Held(limits or Limits(), running)
    open_gpus = capacity.gpus - capacity.foreign_gpus
    free = open_gpus - sum(run.gpus for run in running)
    head: QueuedRun | None = None
    spare = 0.0
    start: list[int] = []
    given: list[float] = []
    waiting: dict[int, str] = {}
    for looked_at, run in enumerate(line, start=1):
        if run.gpus > most_gpus(capacity):
            waiting[run.id] = too_large(run.gpus, capacity)
        elif run.pause_s > 0:
            waiting[run.id] = f"pauses before attempt {run.attempts + 1}"
        elif held.is_limited and (refusal := held.refusal(run)) is not None:
            waiting[run.id] = refusal
        elif head is not None and run.gpus > min(free, spare) + _TOLERANCE:
            waiting[run.id] = _TURN
        elif run.gpus > free + _TOLERANCE:
            head = run
            # Those that were given GPUs just now may end first, too.
            spare = _left_over(run.gpus - free, [*(each.gpus for each in running), *given])
            waiting[run.id] = f"needs {_count(run.gpus)}, {_number(max(free, 0.0))} free"
        else:
            start.append(run.id)
            given.append(run.gpus)
            held.add(run)
            free -= run.gpus
            spare -= run.gpus
            if len(start) == most_starts:
                return Schedule(tuple(start), waiting, has_more=True)
        if head is not None and looked_at >= look and smallest > min(free, spare) + _TOLERANCE:
            return Schedule(tuple(start), waiting, _TURN, _PLACE(run))
    return Schedule(tuple(start), waiting)


def _left_over(missing: float, held: Iterable[float]) -> float:
    """Return the fewest GPUs that are too many once runs have ended whose GPUs are what is missing, or more.

    Any runs may end, in any order: of all their sums the smallest that is enough counts. 0 where none is.
    """
    wanted = max(1, math.ceil(missing / _UNIT - _TOLERANCE))
    mask, least = (1 << wanted) - 1, None
    # Bit n: some runs hold n units together, and that is not enough.
    sums = 1
    for gpus in held:
        with_it = sums << max(1, round(gpus / _UNIT))
        if enough := with_it >> wanted:
            over = (enough & -enough).bit_length() - 1
            least = over if least is None else min(least, over)
        sums |= with_it & mask
    return (least or 0) * _UNIT


def too_large(gpus: float, capacity: Capacity) -> str:
    """Say why a run of so many GPUs cannot start on this cluster as it is."""
    if capacity.gpus <= _TOLERANCE:
        return f"needs {_count(gpus)}, the cluster has none yet"
    return f"needs {_count(gpus)}, the cluster has {_number(capacity.gpus)}"


def most_gpus(capacity: Capacity) -> float:
    """The most GPUs that a run may take to ever start on this cluster."""
    return capacity.gpus + _TOLERANCE


def _number(value: float) -> str:
    return f"{round(value, 3):g}"


def _count(gpus: float) -> str:
    return f"{_number(gpus)} GPU" if _number(gpus) == "1" else f"{_number(gpus)} GPUs"
