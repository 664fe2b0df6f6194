"""One tick's decisions, in its one transaction: rows read, pure rules asked, rows changed, jobs to start and to stop.

`reconcile` says which attempts are over, `retry_policy` what becomes of their runs, `scheduler` what starts next.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Final

from muonscope.contract.attempts import Failure
from muonscope.contract.status import LimitKind, Phase, QueueMode, RunStatus
from service.conclusion import close_attempt
from service.controller.launcher import Job
from service.controller.reconcile import CloseAttempt, LiveAttempt, StopJob, fallen_silent, reconcile
from service.controller.retry_policy import RetryPolicy, backoff_s, retry_reason
from service.controller.scheduler import (
    Capacity,
    Limits,
    QueuedRun,
    RunningRun,
    Schedule,
    decide_starts,
    most_gpus,
    too_large,
)
from service.controller.transitions import LEGAL
from service.errors import ServiceError
from service.settings import Settings
from service.store.attempts import AttemptRepository
from service.store.checkpoints import CheckpointRepository
from service.store.models import Attempt, Run
from service.store.queue import QueueRepository, gpus_of
from service.store.runs import RunRepository
from service.store.session import Session
from service.store.types import read_clock

logger = logging.getLogger(__name__)

WHO: Final = "controller"
# A tick is one transaction, and a request that writes waits for it: what is more, or takes longer, is left to the next
# one, at once.
STARTS_A_TICK: Final = 4
CLOSINGS_A_TICK: Final = 8
REASONS_A_TICK: Final = 400
_REASONS_AT_ONCE: Final = 100
_MOST_S: Final = 0.05
_LOOK: Final = 2000
_NO_TAGS: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a tick knows beside the rows."""

    jobs: Mapping[str, Job] | None
    """The live attempts' jobs; None while Ray cannot be reached."""
    in_flight: frozenset[str] = frozenset()
    refusals: Mapping[str, Failure] = field(default_factory=dict)
    overdue_stops: frozenset[str] = frozenset()
    submitted_phases: Mapping[str, float] = field(default_factory=dict)
    orphans: frozenset[str] = frozenset()
    gpus: float | None = None
    """The cluster's total; None while Ray cannot be reached."""
    foreign_gpus: float = 0.0
    closed: str | None = None
    """Why this process starts nothing more; None while it does."""
    was_away: bool = False
    """Nobody could have extended leases for a while: they get more time."""
    clock_jumped: bool = False
    """The clock that leases are measured on was set: what it said of them before means nothing."""


@dataclass(slots=True)
class Plan:
    """What to do once the transaction is committed."""

    submissions: dict[str, str] = field(default_factory=dict)
    """Submission id -> enrolment token, known here and nowhere else."""
    working_dirs: dict[str, str] = field(default_factory=dict)
    """Submission id -> the package of code that the run's task is in, for those that name one."""
    stops: dict[str, str] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    """Live attempts whose run was asked to stop."""
    held: dict[str, float] = field(default_factory=dict)
    """GPUs by live attempt."""
    changed: bool = False
    is_idle: bool = False
    is_unfinished: bool = False
    """More is to be done now than one tick takes on."""


class Planner:
    def __init__(self, settings: Settings, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._policy = policy
        self._clock = clock
        self._began = float("-inf")

    def plan(self, session: Session, situation: Situation) -> Plan:
        """Decide a tick in the caller's transaction."""
        plan, self._began = Plan(), self._clock()
        names = self._reconcile(session, situation, plan)
        self._schedule(session, situation, plan, names)
        for name in situation.orphans:
            plan.stops[name] = "no live attempt owns this job"
        return plan

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _reconcile(self, session: Session, situation: Situation, plan: Plan) -> dict[int, str]:
        """Returns the submission id of each live attempt by its run, of those closed here too."""
        attempts = AttemptRepository(session)
        if situation.was_away or situation.clock_jumped:
            attempts.extend_leases(
                lease_s=self._settings.lease_s, start_limit_s=self._settings.start_limit_s,
                recording_lease_s=self._settings.recording_lease_s, even_shorter=situation.clock_jumped,
            )  # fmt: skip
        rows = attempts.live_rows()
        for name in {row.submission_id for row in rows} & situation.submitted_phases.keys():
            attempts.add_phase(attempts.get(name), Phase.JOB_SUBMITTED, situation.submitted_phases[name])
        live = [
            LiveAttempt(
                submission_id=row.submission_id,
                is_enrolled=row.is_enrolled,
                is_in_flight=row.submission_id in situation.in_flight,
                lease_expired=row.lease_expired,
                stop_requested=row.stop_requested,
                stop_overdue=row.submission_id in situation.overdue_stops,
                refusal=situation.refusals.get(row.submission_id),
            )
            for row in rows
            if not row.is_recording
        ]
        plan.stopping = {attempt.submission_id for attempt in live if attempt.stop_requested}
        actions = [
            *reconcile(live, situation.jobs),
            *(fallen_silent(row.submission_id) for row in rows if row.is_recording and row.lease_expired),
        ]
        closings = [action for action in actions if isinstance(action, CloseAttempt)]
        plan.is_unfinished |= len(closings) > CLOSINGS_A_TICK
        for closing in closings[:CLOSINGS_A_TICK]:
            name = closing.submission_id
            plan.changed |= self._attempted(session, name, partial(self._close, session, attempts.get(name), closing))
        plan.stops |= {action.submission_id: action.why for action in actions if isinstance(action, StopJob)}
        return {row.run_id: row.submission_id for row in rows}

    def _close(self, session: Session, attempt: Attempt, action: CloseAttempt) -> None:
        close_attempt(
            session,
            attempt,
            action.status,
            failure=action.failure,
            legal=LEGAL,
            retry_reason=lambda failure, number: retry_reason(failure, number, self._policy),
            who=WHO,
            why=action.why,
        )

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _schedule(self, session: Session, situation: Situation, plan: Plan, names: dict[int, str]) -> None:
        queue = QueueRepository(session)
        queue.reckon_with(self._settings.aging_s)
        sizes, holding = queue.sizes(), queue.holding()
        smallest, largest = sizes or (0.0, 0.0)
        plan.held = {names[entry.run_id]: entry.gpus for entry in holding if entry.run_id in names}
        plan.is_idle = sizes is None and not holding
        limits = _limits(queue)
        tags = queue.tags_of(list(limits.tags)) if limits.tags else {}
        now = read_clock(session)
        capacity = None if situation.gpus is None else Capacity(situation.gpus, situation.foreign_gpus)
        told: dict[int, str | None] = {}

        def line() -> Iterator[QueuedRun]:
            for entry in queue.line():
                told[entry.run_id] = entry.reason
                pause_s = 0.0 if entry.failed_at is None else self._pause(entry.failed_at, entry.attempts, now)
                its_tags = tags.get(entry.run_id, _NO_TAGS)
                yield QueuedRun(entry.run_id, entry.gpus, entry.rank, entry.owner, its_tags, pause_s, entry.attempts)

        schedule = decide_starts(
            line(),
            [RunningRun(each.run_id, each.gpus, each.rank, each.owner, tags.get(each.run_id, _NO_TAGS))
             for each in holding],
            capacity,
            smallest=smallest,
            most_starts=STARTS_A_TICK,
            # Whom a limit holds back is told so, and not only that others are before.
            look=_LOOK if limits.users or limits.tags else 0,
            limits=limits,
            closed=situation.closed or _closed(queue),
        )  # fmt: skip
        plan.is_unfinished |= schedule.has_more
        runs = RunRepository(session).by_ids(schedule.start)
        for place, run_id in enumerate(schedule.start):
            if place and self._is_over():
                plan.is_unfinished = True
                break
            self._attempted(session, runs[run_id].uid, partial(self._start, session, runs[run_id], plan))
        news = {run_id: reason for run_id, reason in schedule.waiting.items() if told[run_id] != reason}
        if schedule.rest is not None:
            news |= _news_of_the_rest(queue, schedule, capacity, largest)
        plan.changed |= bool(news)
        self._tell(queue, news, plan)

    def _tell(self, queue: QueueRepository, news: dict[int, str], plan: Plan) -> None:
        """Say why runs wait, as many of them as this tick has time for."""
        for first in range(0, min(len(news), REASONS_A_TICK), _REASONS_AT_ONCE):
            if first and self._is_over():
                plan.is_unfinished = True
                return
            queue.set_reasons(dict(islice(news.items(), first, first + _REASONS_AT_ONCE)))
        plan.is_unfinished |= len(news) > REASONS_A_TICK

    def _is_over(self) -> bool:
        """Whether this tick has taken its time."""
        return self._clock() - self._began > _MOST_S

    def _pause(self, failed_at: datetime, attempts: int, now: datetime) -> float:
        waited = (now - failed_at).total_seconds()
        # Negative where the clock was set back: nobody waits an hour for it to come round again.
        return max(0.0, backoff_s(attempts, self._policy) - waited) if waited >= 0 else 0.0

    def _attempted(self, session: Session, name: str, change: Callable[[], None]) -> bool:
        """Make one change under a savepoint: a row that refuses it must not keep all others from theirs."""
        try:
            with session.begin_nested():
                change()
        except ServiceError as error:
            logger.error("%s: %s", name, error, extra={"action": "change_refused"})
            return False
        return True

    def _start(self, session: Session, run: Run, plan: Plan) -> None:
        token = new_enrolment_token()
        attempts = AttemptRepository(session)
        first_step = CheckpointRepository(session).resume_step(run)
        attempt = attempts.create(
            run, enrolment_token=token, lease_s=self._settings.start_limit_s, first_step=first_step, who=WHO,
            why=f"submitted as a Ray job, to resume at step {first_step}" if first_step else "submitted as a Ray job",
        )  # fmt: skip
        queued_at = run.created_at if attempt.number == 1 else attempt.created_at
        attempt.phases = {Phase.SUBMITTED.value: queued_at.timestamp()}
        RunRepository(session).set_status(run, RunStatus.PENDING, legal=LEGAL, who=WHO, why="its GPUs are free")
        plan.submissions[attempt.submission_id] = token
        if run.spec.get("working_dir"):
            plan.working_dirs[attempt.submission_id] = run.spec["working_dir"]
        plan.held[attempt.submission_id] = gpus_of(run)
        plan.changed = True
        plan.is_idle = False


def _news_of_the_rest(
    queue: QueueRepository, schedule: Schedule, capacity: Capacity | None, largest: float
) -> dict[int, str]:
    """Why those behind the last run that was looked at wait, where they have been told otherwise.

    Args:
        queue: the line.
        schedule: what was decided of those before.
        capacity: None while the cluster cannot be reached.
        largest: the most GPUs that a run of the line wants.
    """
    assert schedule.rest is not None
    if schedule.last is None or capacity is None:
        # Nothing starts, whatever its size.
        return dict.fromkeys(queue.told_otherwise(schedule.rest, limit=REASONS_A_TICK + 1), schedule.rest)
    most = most_gpus(capacity)
    behind = queue.told_otherwise(schedule.rest, behind=schedule.last, most_gpus=most, limit=REASONS_A_TICK + 1)
    news = dict.fromkeys(behind, schedule.rest)
    for entry in queue.larger(most, behind=schedule.last) if largest > most else ():
        reason = too_large(entry.gpus, capacity)
        if entry.reason != reason:
            news[entry.run_id] = reason
    return news


def _limits(queue: QueueRepository) -> Limits:
    rows = queue.limits()
    return Limits(
        users={row.name: row.max_gpus for row in rows if row.kind is LimitKind.USER},
        tags={row.name: row.max_gpus for row in rows if row.kind is LimitKind.TAG},
    )


def _closed(queue: QueueRepository) -> str | None:
    state = queue.state()
    if state.mode is QueueMode.OPEN:
        return None
    because = f": {state.why}" if state.why else ""
    return f"the queue is {state.mode}, by {state.who}{because}"


def new_enrolment_token() -> str:
    """Make a one-use secret: 256 random bits."""
    return secrets.token_urlsafe(32)
