"""Which queued runs start now, and why the others wait. Pure: numbers in, decisions out.

Order: priority, raised by one for each `aging_s` a run has waited, then first come, first served. The first run that
does not fit holds the head of the line: nothing behind it may take GPUs that it will need. What it will never need
(the cluster's total less its own share) stays open, so that an 8-GPU run on a large cluster keeps no one waiting,
and a stream of small runs cannot starve it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

# GPU shares are sums of tenths and thirds: a run that fits exactly must not fail on the last bit.
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """A run that wants to start."""

    id: int
    """Grows with the order of submission."""
    gpus: float
    priority: int = 0
    waited_s: float = 0.0
    pause_s: float = 0.0
    """What is left of the pause before its next attempt."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run that holds, or is about to hold, GPUs."""

    id: int
    gpus: float
    priority: int = 0
    waited_s: float = 0.0
    """How long ago it was submitted, in the same clock as QueuedRun's."""


@dataclass(frozen=True, slots=True)
class Capacity:
    gpus: float
    """All of the cluster's."""
    foreign_gpus: float = 0.0
    """Held by jobs that are not ours."""


@dataclass(frozen=True, slots=True)
class Schedule:
    start: tuple[int, ...] = ()
    """Runs to start now, in order."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Why each other queued run does not start."""


def decide_starts(
    queued: Sequence[QueuedRun],
    running: Sequence[RunningRun],
    capacity: Capacity | None,
    *,
    aging_s: float,
) -> Schedule:
    """Choose what starts now.

    Args:
        queued: in any order.
        running: every live run of ours.
        capacity: None while the cluster cannot be reached: nothing starts.
        aging_s: the wait that is worth one point of priority.
    """
    line = sorted(queued, key=lambda run: _rank(run, aging_s))
    if capacity is None:
        return Schedule(waiting={run.id: "the Ray cluster is not reachable" for run in line})
    open_gpus = capacity.gpus - capacity.foreign_gpus
    free = open_gpus - sum(run.gpus for run in running)
    # What those behind the head of the line hold already counts against what they may take.
    behind = [(_rank(run, aging_s), run.gpus) for run in running]
    head: QueuedRun | None = None
    spare = 0.0
    start: list[int] = []
    waiting: dict[int, str] = {}
    for run in line:
        if run.gpus > capacity.gpus + _TOLERANCE:
            waiting[run.id] = f"needs {_count(run.gpus)}, the cluster has {_number(capacity.gpus)}"
        elif run.pause_s > 0:
            waiting[run.id] = f"pauses before attempt {run.attempts + 1}"
        elif head is not None and run.gpus > min(free, spare) + _TOLERANCE:
            waiting[run.id] = "waits for its turn"
        elif run.gpus > free + _TOLERANCE:
            head = run
            held_behind = sum(gpus for rank, gpus in behind if rank > _rank(run, aging_s))
            spare = open_gpus - run.gpus - held_behind
            waiting[run.id] = f"needs {_count(run.gpus)}, {_number(max(free, 0.0))} free"
        else:
            start.append(run.id)
            free -= run.gpus
            spare -= run.gpus
    return Schedule(tuple(start), waiting)


def effective_priority(priority: int, waited_s: float, aging_s: float) -> int:
    """Return the priority with what waiting has added to it."""
    return priority + int(max(waited_s, 0.0) // aging_s)


def _rank(run: QueuedRun | RunningRun, aging_s: float) -> tuple[int, int]:
    return -effective_priority(run.priority, run.waited_s, aging_s), run.id


def _number(value: float) -> str:
    return f"{round(value, 3):g}"


def _count(gpus: float) -> str:
    return f"{_number(gpus)} GPU" if _number(gpus) == "1" else f"{_number(gpus)} GPUs"
