"""Carries runs to another tracker, as they grow and as they ended, off every path that a run depends on.

A thread of the leading controller reads what the tracker lacks, hands it over with no transaction open, and only then
keeps how far it came. A tracker that is slow or gone delays nothing but itself: the record is ours, and what was not
taken stays due. A piece that was taken and not noted, because this process was killed between the two, is sent once
more: its keys, times and values are the same.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from muonscope.contract.status import RunStatus
from service.errors import NotFound, ServiceError
from service.store.mirrors import AttemptSteps, Cursor, MirrorRepository
from service.store.models import Run
from service.store.runs import RunRepository
from service.store.session import Database

logger = logging.getLogger(__name__)

# 12 series and 2 flags a step: MLflow takes at most 1000 metrics at once.
_STEPS: Final = 71
_PIECES: Final = 50
_RUNS: Final = 20
_LOOK_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 120.0
_STOP_S: Final = 2.0


class TrackingAway(Exception):
    """The tracker does not answer, or says "later": the same again may be taken."""


class TrackingRefused(Exception):
    """The tracker will not take this of this run."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of one series, NaN and the infinities as themselves."""

    key: str
    value: float
    step: int
    timestamp_ms: int


class Tracking(Protocol):
    """Another tracker, as far as a mirror needs it. Each call raises TrackingAway or TrackingRefused."""

    def open_run(self, uid: str, name: str, *, started_ms: int, params: Mapping[str, str]) -> str:
        """Return the tracker's id of this run of ours, made now unless it has one."""

    def log(self, remote_id: str, metrics: Sequence[Measured]) -> None: ...

    def set_tags(self, remote_id: str, tags: Mapping[str, str]) -> None: ...

    def set_status(self, remote_id: str, status: RunStatus, *, ended_ms: int | None) -> None: ...


@dataclass(frozen=True, slots=True)
class _Due:
    """What the tracker lacks of a run, as of one moment."""

    run: Run
    cursor: Cursor | None
    steps: AttemptSteps | None


class Mirror:
    """Runs from `start` to `stop`, and works while this controller leads."""

    def __init__(
        self, database: Database, connect: Callable[[], Tracking], *, target: str, is_leading: Callable[[], bool]
    ) -> None:
        """Connect to nothing yet.

        Args:
            database: the store.
            connect: gives the tracker; called on the mirror's own thread, again until it succeeds.
            target: names the tracker in the store: with another name everything is carried over anew.
            is_leading: whether this controller leads.
        """
        self._database, self._connect = database, connect
        self._target, self._is_leading = target, is_leading
        self._tracking: Tracking | None = None
        self._refused: dict[str, int] = {}
        self._is_away = False
        self._ended = threading.Event()
        # A call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End after the call that runs, or without it when it takes long."""
        self._ended.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _STOP_S)

    def _keep(self) -> None:
        pause_s = _LOOK_S
        while not self._ended.wait(pause_s):
            if self._is_leading():
                pause_s = _LOOK_S if self.carry() else min(2 * pause_s, _LONGEST_PAUSE_S)

    def carry(self) -> bool:
        """Carry over what is due, a bounded amount of each run; returns whether the tracker took it. Blocks."""
        try:
            with self._database.read() as session:
                due = MirrorRepository(session).behind(self._target, limit=_RUNS + len(self._refused))
            if due and self._tracking is None:
                self._tracking = self._connect()
            for uid, revision in due:
                if self._ended.is_set():
                    break
                if self._refused.get(uid) != revision:
                    self._carry_run(uid, revision)
        except (TrackingAway, TrackingRefused, ServiceError) as error:
            # Said once: it may last for days.
            if not self._is_away:
                logger.warning("the mirror waits: %s", error, extra={"action": "mirror_waits"})
            self._is_away = True
            return False
        except Exception:
            logger.exception("the mirror failed", extra={"action": "mirror_failed"})
            return False
        self._is_away = False
        return True

    def _carry_run(self, uid: str, revision: int) -> None:
        try:
            for _ in range(_PIECES):
                if self._ended.is_set() or self._carry_piece(self._due(uid)):
                    break
        except NotFound:
            # Deleted meanwhile.
            return
        except TrackingRefused as refusal:
            if uid not in self._refused:
                logger.warning("run %s is not mirrored: %s", uid, refusal, extra={"action": "mirror_refused"})
            self._refused[uid] = revision
            return
        self._refused.pop(uid, None)

    def _due(self, uid: str) -> _Due:
        with self._database.read() as session:
            run = RunRepository(session).get(uid)
            mirrors = MirrorRepository(session)
            cursor = mirrors.cursor(run, self._target)
            steps = mirrors.steps_after(run, cursor or Cursor(""), limit=_STEPS)
            return _Due(run, cursor, steps)

    def _carry_piece(self, due: _Due) -> bool:
        """Carry over the next piece of a run; returns whether that was the last one."""
        tracking, run, cursor = self._tracking, due.run, due.cursor
        assert tracking is not None
        if cursor is None:
            started_ms = _milliseconds(run.started_at or run.created_at)
            params = dict(flattened(run.spec))
            cursor = Cursor(tracking.open_run(run.uid, run.name, started_ms=started_ms, params=params))
        if due.steps is not None:
            tracking.log(cursor.remote_id, measured(due.steps))
            cursor = replace(cursor, attempt=due.steps.attempt, next_step=int(due.steps.columns.step[-1]) + 1)
        else:
            tracking.set_tags(cursor.remote_id, tags_of(run))
            ended_ms = None if run.finished_at is None else _milliseconds(run.finished_at)
            tracking.set_status(cursor.remote_id, run.status, ended_ms=ended_ms)
            cursor = replace(cursor, revision=run.revision)
        with self._database.write(durable=False) as session:
            MirrorRepository(session).advance(run.uid, self._target, cursor)
        return due.steps is None


def measured(steps: AttemptSteps) -> list[Measured]:
    """Return every value that was measured at these steps; what was not is left out."""
    columns, found = steps.columns, list[Measured]()
    flags = {"overflow": columns.overflow.tolist(), "discarded": columns.discarded.tolist()}
    series = {name: (values.tolist(), columns.measured[name].tolist()) for name, values in columns.values.items()}
    for place, step in enumerate(columns.step.tolist()):
        for name, (values, is_there) in series.items():
            if is_there[place]:
                found.append(Measured(name, values[place], step, steps.created_ms))
        found += [Measured(name, float(flag[place]), step, steps.created_ms) for name, flag in flags.items()]
    return found


def flattened(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a spec's fields as a tracker's flat parameters: `task.name`, a list as JSON; nothing for null."""
    for key, value in spec.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def tags_of(run: Run) -> dict[str, str]:
    """Return what is known of a run beside its numbers; nothing for what is not known."""
    facts = {
        "status": run.status,
        "verdict": run.verdict,
        "verdict_step": run.verdict_step,
        "verdict_parameter": run.verdict_parameter,
        "verdict_evidence": run.verdict_evidence,
        "failure_kind": run.failure_kind,
        "failure_step": run.failure_step,
        "failure_message": run.failure_message,
        "fingerprint": run.fingerprint,
        "submitted_by": run.submitted_by,
        "tags": ", ".join(tag.tag for tag in run.tags),
    }
    return {f"muonscope.{name}": str(fact) for name, fact in facts.items() if fact not in (None, "")}


def _milliseconds(moment: Any) -> int:
    return int(moment.timestamp() * 1000)
