"""One tick's decisions, in its one transaction: rows read, pure rules asked, rows changed, jobs to start and to stop.

`reconcile` says which attempts are over, `retry_policy` what becomes of their runs, `scheduler` what starts next.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final

from muonscope.contract.attempts import Failure
from muonscope.contract.status import Phase, RunStatus
from service.conclusion import close_attempt
from service.controller.launcher import Job
from service.controller.reconcile import CloseAttempt, LiveAttempt, StopJob, reconcile
from service.controller.retry_policy import RetryPolicy, backoff_s, retry_reason
from service.controller.scheduler import Capacity, QueuedRun, RunningRun, decide_starts
from service.controller.transitions import LEGAL
from service.errors import ServiceError
from service.settings import Settings
from service.store.attempts import AttemptRepository
from service.store.models import Attempt, Run
from service.store.runs import RunRepository
from service.store.session import Session
from service.store.types import read_clock

logger = logging.getLogger(__name__)

WHO: Final = "controller"
# How deep one tick looks into the queue: what lies further back cannot start before what lies here.
QUEUE_WINDOW: Final = 500


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
    was_away: bool = False
    """Nobody could have extended leases for a while: they get more time."""


@dataclass(slots=True)
class Plan:
    """What to do once the transaction is committed."""

    submissions: dict[str, str] = field(default_factory=dict)
    """Submission id -> enrolment token, known here and nowhere else."""
    stops: dict[str, str] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    """Live attempts whose run was asked to stop."""
    held: dict[str, float] = field(default_factory=dict)
    """GPUs by live attempt."""
    changed: bool = False
    is_idle: bool = False


class Planner:
    def __init__(self, settings: Settings, policy: RetryPolicy) -> None:
        self._settings = settings
        self._policy = policy

    def plan(self, session: Session, situation: Situation) -> Plan:
        """Decide a tick in the caller's transaction."""
        plan = Plan()
        self._reconcile(session, situation, plan)
        self._schedule(session, situation, plan)
        for name in situation.orphans:
            plan.stops[name] = "no live attempt owns this job"
        return plan

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _reconcile(self, session: Session, situation: Situation, plan: Plan) -> None:
        attempts = AttemptRepository(session)
        rows = {attempt.submission_id: attempt for attempt in attempts.live()}
        for name in rows.keys() & situation.submitted_phases.keys():
            attempts.add_phase(rows[name], Phase.JOB_SUBMITTED, situation.submitted_phases[name])
        if situation.was_away:
            self._extend_leases(session, rows)
        expired = {attempt.submission_id for attempt in attempts.expired()}
        live = [
            LiveAttempt(
                submission_id=name,
                is_enrolled=attempt.enrolled_at is not None,
                is_in_flight=name in situation.in_flight,
                lease_expired=name in expired,
                stop_requested=attempt.run.stop_requested,
                stop_overdue=name in situation.overdue_stops,
                refusal=situation.refusals.get(name),
            )
            for name, attempt in rows.items()
        ]
        plan.stopping = {attempt.submission_id for attempt in live if attempt.stop_requested}
        for action in reconcile(live, situation.jobs):
            if isinstance(action, StopJob):
                plan.stops[action.submission_id] = action.why
            else:
                plan.changed |= self._attempted(
                    session, action.submission_id, partial(self._close, session, rows[action.submission_id], action)
                )

    def _extend_leases(self, session: Session, rows: Mapping[str, Attempt]) -> None:
        attempts, now = AttemptRepository(session), read_clock(session)
        for attempt in rows.values():
            lease_s = self._settings.lease_s if attempt.enrolled_at is not None else self._settings.start_limit_s
            if (attempt.lease_expires_at - now).total_seconds() < lease_s:
                attempts.extend_lease(attempt, lease_s=lease_s)

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

    def _schedule(self, session: Session, situation: Situation, plan: Plan) -> None:
        runs = RunRepository(session)
        live, queue = runs.live(), runs.queued(limit=QUEUE_WINDOW)
        now = read_clock(session)
        plan.held = {run.attempts[-1].submission_id: gpus_of(run) for run in live if run.attempts}
        plan.is_idle = not live and not queue
        capacity = None if situation.gpus is None else Capacity(situation.gpus, situation.foreign_gpus)
        schedule = decide_starts(
            [self._queued(run, now) for run in queue],
            [RunningRun(run.id, gpus_of(run), run.priority, _seconds(run.created_at, now)) for run in live],
            capacity,
            aging_s=self._settings.aging_s,
        )
        by_id = {run.id: run for run in queue}
        for run_id in schedule.start:
            self._attempted(session, by_id[run_id].uid, partial(self._start, session, by_id[run_id], plan))
        for run_id, reason in schedule.waiting.items():
            plan.changed |= by_id[run_id].waiting_reason != reason
            runs.set_waiting_reason(by_id[run_id], reason)

    def _queued(self, run: Run, now: datetime) -> QueuedRun:
        last = run.attempts[-1] if run.attempts else None
        pause = 0.0
        if (
            last is not None
            and last.finished_at is not None
            and last.failure_kind
            and last.failure_kind.is_infrastructure
        ):
            pause = max(0.0, backoff_s(last.number, self._policy) - _seconds(last.finished_at, now))
        return QueuedRun(
            id=run.id,
            gpus=gpus_of(run),
            priority=run.priority,
            waited_s=_seconds(run.created_at, now),
            pause_s=pause,
            attempts=len(run.attempts),
        )

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
        attempt = attempts.create(run, enrolment_token=token, lease_s=self._settings.start_limit_s, who=WHO)
        queued_at = run.created_at if attempt.number == 1 else attempt.created_at
        attempt.phases = {Phase.SUBMITTED.value: queued_at.timestamp()}
        RunRepository(session).set_status(run, RunStatus.PENDING, legal=LEGAL, who=WHO, why="its GPUs are free")
        plan.submissions[attempt.submission_id] = token
        plan.held[attempt.submission_id] = gpus_of(run)
        plan.changed = True
        plan.is_idle = False


def gpus_of(run: Run) -> float:
    """Return how many GPUs a run takes."""
    share = (run.spec.get("resources") or {}).get("gpus_per_rank", 1.0)
    return float(run.world_size * share)


def new_enrolment_token() -> str:
    """Make a one-use secret: 256 random bits."""
    return secrets.token_urlsafe(32)


def _seconds(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()
