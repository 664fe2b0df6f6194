"""One tick's decisions, in its one transaction: rows read, pure rules asked, rows changed, jobs to start and to stop.

`reconcile` says which attempts are over, `retry_policy` what becomes of their runs, `scheduler` what starts next.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
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
from service.controller.scheduler import Capacity, Limits, QueuedRun, RunningRun, decide_starts
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
# A tick is one transaction, and a request that writes waits for it: what is more is left to the next one, at once.
STARTS_A_TICK: Final = 4
CLOSINGS_A_TICK: Final = 8
REASONS_A_TICK: Final = 1000
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
        queue = QueueRepository(session)
        queue.reckon_with(self._settings.aging_s)
        waiting, holding = queue.waiting(), queue.holding()
        names = {row.run_id: row.submission_id for row in AttemptRepository(session).live_rows()}
        plan.held = {names[entry.run_id]: entry.gpus for entry in holding if entry.run_id in names}
        plan.is_idle = not waiting and not holding
        limits = _limits(queue)
        tags = queue.tags_of(list(limits.tags)) if limits.tags else {}
        now = read_clock(session)
        capacity = None if situation.gpus is None else Capacity(situation.gpus, situation.foreign_gpus)
        schedule = decide_starts(
            [
                QueuedRun(
                    entry.run_id, entry.gpus, entry.rank, entry.owner, tags.get(entry.run_id, _NO_TAGS),
                    0.0 if entry.failed_at is None else self._pause(entry.failed_at, entry.attempts, now),
                    entry.attempts,
                )
                for entry in waiting
            ],
            [RunningRun(each.run_id, each.gpus, each.rank, each.owner, tags.get(each.run_id, _NO_TAGS))
             for each in holding],
            capacity,
            limits=limits,
            closed=situation.closed or _closed(queue),
        )  # fmt: skip
        starting = schedule.start[:STARTS_A_TICK]
        runs = RunRepository(session).by_ids(starting)
        for run_id in starting:
            self._attempted(session, runs[run_id].uid, partial(self._start, session, runs[run_id], plan))
        told = {entry.run_id: entry.reason for entry in waiting}
        news = {run_id: reason for run_id, reason in schedule.waiting.items() if told[run_id] != reason}
        queue.set_reasons(dict(islice(news.items(), REASONS_A_TICK)))
        plan.changed |= bool(news)
        plan.is_unfinished |= len(schedule.start) > len(starting) or len(news) > REASONS_A_TICK

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
