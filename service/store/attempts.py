"""Attempts: one Ray job each, enrolled once, alive by heartbeat, fenced by epoch.

Tokens are stored as SHA-256 hashes and compared in constant time. Leases run on the database's clock.
"""

import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import and_, not_, select, true, update
from sqlalchemy.orm import Session, joinedload

from muonscope.contract.attempts import AttemptFacts, AttemptOutcome, Failure, FinalState, Heartbeat
from muonscope.contract.run_spec import EXTERNAL_TASK
from muonscope.contract.status import AttemptStatus
from service.errors import Conflict, IllegalTransition, NotFound, Unauthorized
from service.store.events import EventRepository
from service.store.models import Attempt, Event, Run
from service.store.parameters import ParameterRepository
from service.store.runs import RunRepository
from service.store.summary import set_final_state
from service.store.types import database_now, read_clock, storable_text

LIVE = (AttemptStatus.PENDING, AttemptStatus.RUNNING)


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class LiveRow(NamedTuple):
    """A live attempt, as a tick reads it."""

    id: int
    submission_id: str
    run_id: int
    is_enrolled: bool
    lease_expired: bool
    stop_requested: bool
    is_recording: bool
    """A script of somebody's own: it has no Ray job."""


class AttemptRepository:
    """All that is asked of attempts. Those it returns have their run loaded, with its summary."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        run: Run,
        *,
        enrolment_token: str,
        lease_s: float,
        first_step: int = 0,
        who: str = "controller",
        why: str = "submitted as a Ray job",
    ) -> Attempt:
        """Begin the run's next attempt under a new epoch, which fences every earlier one.

        Args:
            run: as RunRepository loads it.
            enrolment_token: the one-use secret of the job's command line; only its hash is kept.
            lease_s: how long the attempt may stay silent from now.
            first_step: the step it begins at: above 0 it resumes from a checkpoint.
        Raises:
            IllegalTransition: an earlier attempt of the run is still live.
        """
        alive = [attempt for attempt in run.attempts if not attempt.status.is_terminal]
        if alive:
            raise IllegalTransition(
                f"{alive[0].submission_id} is still {alive[0].status}",
                field="attempt",
                value=alive[0].number,
                remedy="end it before another attempt begins",
            )
        now = read_clock(self._session)
        number = max((attempt.number for attempt in run.attempts), default=0) + 1
        run.epoch += 1
        attempt = Attempt(
            run_id=run.id,
            number=number,
            submission_id=f"run-{run.uid}-a{number}",
            status=AttemptStatus.PENDING,
            epoch=run.epoch,
            enrolment_token_hash=hash_token(enrolment_token),
            lease_expires_at=now + timedelta(seconds=lease_s),
            silent_ranks=[],
            phases={},
            environment={},
            ranks=[],
            steps_recorded=0,
            stored_steps=0,
            first_step=first_step,
            next_step=first_step,
            created_at=now,
        )
        if run.attempts:
            # What was measured at the end of the one before is not this one's.
            set_final_state(run, FinalState())
        run.attempts.append(attempt)
        self._session.add(attempt)
        self._session.flush()
        RunRepository(self._session).touch(run)
        EventRepository(self._session).append(
            "attempt_status", run=run, attempt=attempt, to_status=attempt.status, who=who, why=why
        )
        return attempt

    # -- finding ----------------------------------------------------------------------------------------------------

    def find(self, submission_id: str) -> Attempt | None:
        query = select(Attempt).where(Attempt.submission_id == storable_text(submission_id))
        return self._session.scalars(query.options(joinedload(Attempt.run).joinedload(Run.summary))).one_or_none()

    def get(self, submission_id: str) -> Attempt:
        """Return the attempt of this id; raises NotFound."""
        attempt = self.find(submission_id)
        if attempt is None:
            raise NotFound(f"there is no attempt {submission_id[:64]!r}", field="id", value=submission_id)
        return attempt

    def live(self) -> Sequence[Attempt]:
        """List attempts without an outcome, oldest first."""
        query = select(Attempt).where(Attempt.status.in_(LIVE)).order_by(Attempt.id)
        return self._session.scalars(query.options(joinedload(Attempt.run).joinedload(Run.summary))).all()

    def live_rows(self) -> Sequence[LiveRow]:
        """Return of every live attempt what a tick needs, oldest first, without its documents."""
        query = (
            select(
                Attempt.id,
                Attempt.submission_id,
                Attempt.run_id,
                Attempt.enrolled_at.is_not(None),
                Attempt.lease_expires_at < database_now(),
                Run.stop_requested,
                Run.task == EXTERNAL_TASK,
            )
            .join(Run, Run.id == Attempt.run_id)
            .where(Attempt.status.in_(LIVE))
            .order_by(Attempt.id)
        )
        return [LiveRow(*row) for row in self._session.execute(query)]

    def live_jobs(self) -> list[str]:
        """List the submission ids of live attempts but those of scripts that record themselves, oldest first."""
        query = select(Attempt.submission_id).join(Run, Run.id == Attempt.run_id)
        query = query.where(Attempt.status.in_(LIVE), Run.task != EXTERNAL_TASK).order_by(Attempt.id)
        return list(self._session.scalars(query))

    def has_wanted_jobs(self) -> bool:
        """Whether a live attempt's job is one that nobody has asked to end."""
        query = select(Attempt.id).join(Run, Run.id == Attempt.run_id)
        wanted = query.where(Attempt.status.in_(LIVE), Run.task != EXTERNAL_TASK, Run.stop_requested.is_(False))
        return self._session.scalars(wanted.limit(1)).first() is not None

    def extend_leases(
        self, *, lease_s: float, start_limit_s: float, recording_lease_s: float, even_shorter: bool = False
    ) -> None:
        """Give every live attempt its whole time anew, as after nobody could take in signs of life.

        Args:
            lease_s: of those that have enrolled.
            start_limit_s: of those that have not.
            recording_lease_s: of scripts that record themselves.
            even_shorter: also where that is less than they have, as after the clock was set back.
        """
        now = read_clock(self._session)
        recorded = Attempt.run_id.in_(select(Run.id).where(Run.task == EXTERNAL_TASK))
        enrolled = and_(Attempt.enrolled_at.is_not(None), not_(recorded))
        kinds = ((enrolled, lease_s), (Attempt.enrolled_at.is_(None), start_limit_s), (recorded, recording_lease_s))
        for of_this_kind, span_s in kinds:
            until = now + timedelta(seconds=span_s)
            self._session.execute(
                update(Attempt)
                .where(
                    Attempt.status.in_(LIVE), of_this_kind, true() if even_shorter else Attempt.lease_expires_at < until
                )
                .values(lease_expires_at=until)
            )

    def expired(self) -> Sequence[Attempt]:
        """List live attempts whose lease has run out on the database's clock."""
        query = select(Attempt).where(Attempt.status.in_(LIVE), Attempt.lease_expires_at < database_now())
        query = query.order_by(Attempt.id).options(joinedload(Attempt.run).joinedload(Run.summary))
        return self._session.scalars(query).all()

    # -- the workers' door ------------------------------------------------------------------------------------------

    def enrol(
        self, submission_id: str, *, enrolment_token: str, token: str, lease_s: float, ray_job_id: str | None = None
    ) -> Attempt:
        """Exchange the one-use enrolment token for the attempt's own.

        Raises:
            NotFound: no such attempt.
            Unauthorized: a wrong enrolment token.
            Conflict: the token was used before, or the attempt has ended or is superseded.
        """
        attempt = self.get(submission_id)
        if not hmac.compare_digest(attempt.enrolment_token_hash, hash_token(enrolment_token)):
            raise Unauthorized(
                "the enrolment token is not this attempt's", remedy="use the one of the job's command line"
            )
        self.fence(attempt, attempt.epoch)
        if attempt.enrolled_at is not None:
            raise Conflict(
                f"{submission_id} has enrolled already; an enrolment token works once",
                field="token",
                remedy="let the service start another attempt",
            )
        now = read_clock(self._session)
        attempt.enrolled_at = attempt.heartbeat_at = now
        attempt.lease_expires_at = now + timedelta(seconds=lease_s)
        attempt.token_hash = hash_token(token)
        attempt.ray_job_id = ray_job_id
        return attempt

    def authenticate(self, submission_id: str, token: str | None) -> Attempt:
        """Return the attempt this bearer token belongs to.

        Raises:
            NotFound: no such attempt.
            Unauthorized: no token, not the attempt's, or the attempt has not enrolled.
        """
        attempt = self.get(submission_id)
        if token is None or not hmac.compare_digest(attempt.token_hash or "", hash_token(token)):
            raise Unauthorized(
                "the bearer token is not this attempt's", remedy="enrol, and send the token that enrolment gave"
            )
        return attempt

    def fence(self, attempt: Attempt, epoch: int) -> None:
        """Refuse whoever speaks for an attempt that is over or was superseded.

        Raises:
            Conflict: the epoch is not the run's newest, or the attempt has ended.
        """
        if epoch != attempt.epoch or attempt.epoch != attempt.run.epoch:
            raise Conflict(
                f"epoch {epoch} is superseded: run {attempt.run.uid} is at epoch {attempt.run.epoch}",
                field="epoch",
                value=epoch,
                remedy="stop; a newer attempt writes this run's record",
            )
        if attempt.status.is_terminal:
            raise Conflict(
                f"{attempt.submission_id} has ended as {attempt.status}",
                field="status",
                value=attempt.status,
                remedy="stop; its record is closed",
            )

    def heartbeat(self, attempt: Attempt, message: Heartbeat, *, lease_s: float) -> None:
        """Note a sign of life and extend the lease."""
        now = read_clock(self._session)
        attempt.heartbeat_at = now
        attempt.lease_expires_at = now + timedelta(seconds=lease_s)
        attempt.steps_recorded = message.steps_recorded
        attempt.silent_ranks = list(message.silent_ranks)

    def extend_lease(self, attempt: Attempt, *, lease_s: float) -> None:
        """Give the attempt more time, as after the controller itself was away."""
        attempt.lease_expires_at = read_clock(self._session) + timedelta(seconds=lease_s)

    def add_facts(self, attempt: Attempt, facts: AttemptFacts) -> None:
        """Add what the attempt says about itself; a later message replaces the fields it sets."""
        document = facts.model_dump(mode="json", exclude_unset=True)
        attempt.phases = {**attempt.phases, **document.get("phases", {})}
        attempt.environment = {**attempt.environment, **document.get("environment", {})}
        if facts.ranks is not None:
            attempt.ranks = document["ranks"]
        if facts.parameters is not None:
            ParameterRepository(self._session).replace(attempt.run_id, facts.parameters)
        for name in ("momentum_unit", "data_hash", "initial_parameters_hash", "resolved_ds_config"):
            if getattr(facts, name) is not None:
                setattr(attempt, name, getattr(facts, name))
        RunRepository(self._session).touch(attempt.run)

    def add_phase(self, attempt: Attempt, phase: str, at: float) -> None:
        """Note when a phase ended, in Unix seconds."""
        attempt.phases = {**attempt.phases, phase: at}
        RunRepository(self._session).touch(attempt.run)

    # -- changing ---------------------------------------------------------------------------------------------------

    def set_status(
        self, attempt: Attempt, to: AttemptStatus, *, who: str, why: str, failure: Failure | None = None
    ) -> Event:
        """Move an attempt on: pending to running, either to a terminal status, and never back.

        Raises:
            IllegalTransition: the attempt has ended, or has this status already, or would become pending.
        """
        origin = attempt.status
        if origin.is_terminal or to is origin or to is AttemptStatus.PENDING:
            raise IllegalTransition(
                f"{attempt.submission_id} is {origin} and cannot become {to}", field="status", value=origin
            )
        now = read_clock(self._session)
        attempt.status = to
        if to is AttemptStatus.RUNNING:
            attempt.started_at = now
        else:
            attempt.finished_at = now
            set_attempt_failure(attempt, failure)
        RunRepository(self._session).touch(attempt.run)
        detail: dict[str, Any] | None = failure.model_dump(mode="json") if failure is not None else None
        return EventRepository(self._session).append(
            "attempt_status", attempt=attempt, from_status=origin, to_status=to, who=who, why=why, detail=detail
        )

    def record_outcome(self, attempt: Attempt, outcome: AttemptOutcome) -> None:
        """Keep what the attempt declares at its end, and its final state in the run's summary."""
        attempt.declared_steps = outcome.declared_steps
        if outcome.final is None:
            return
        attempt.final = outcome.final.model_dump(mode="json")
        set_final_state(attempt.run, outcome.final)


def set_attempt_failure(attempt: Attempt, failure: Failure | None) -> None:
    attempt.failure_kind = failure.kind if failure is not None else None
    attempt.failure_rank = failure.rank if failure is not None else None
    attempt.failure_step = failure.step if failure is not None else None
    attempt.failure_message = failure.message if failure is not None else None
