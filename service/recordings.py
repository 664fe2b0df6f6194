"""Runs that the service does not start: their rows, made in one transaction, running from the first moment.

Such a run has one attempt and no Ray job. It is in no queue and holds no GPU; its attempt lives by its lease alone.
"""

import secrets
from typing import Final, NamedTuple

from muonscope.contract.run_spec import EXTERNAL_TASK, RunSpec
from muonscope.contract.status import AttemptStatus, RunStatus
from service.store.attempts import AttemptRepository
from service.store.models import Attempt, Run
from service.store.queue import QueueRepository
from service.store.runs import Legal, RunRepository
from service.store.session import Session

HEARTBEAT_S: Final = 10.0


class Begun(NamedTuple):
    attempt: Attempt
    token: str
    """The attempt's own, known here and to whoever asked."""


def is_recording(run: Run) -> bool:
    """Whether the run is a script of somebody's own, which nobody here may start or stop."""
    return run.task == EXTERNAL_TASK


def is_open_ended(run: Run) -> bool:
    """Whether only the record says how many steps the run has."""
    return is_recording(run) and bool(run.spec["task"].get("is_open_ended"))


def begin_recording(
    session: Session,
    spec: RunSpec,
    *,
    lease_s: float,
    legal: Legal,
    who: str,
    why: str,
    first_step: int = 0,
    idempotency_key: str | None = None,
) -> Begun:
    """Make the run and its attempt, both running.

    Args:
        session: a writing one; nothing is committed here.
        spec: what is said of the run.
        lease_s: how long the attempt may stay silent.
        legal: the run's legal transitions.
        who: who says it.
        why: for the run's history.
        first_step: of the record.
        idempotency_key: names the run for a repeat, which has to ask for it first.
    """
    runs, attempts = RunRepository(session), AttemptRepository(session)
    run, _ = runs.create(spec, idempotency_key=idempotency_key, who=who, why=why, submitted_by=who)
    runs.set_status(run, RunStatus.PENDING, legal=legal, who=who, why=why)
    one_use, token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    attempt = attempts.create(run, enrolment_token=one_use, lease_s=lease_s, first_step=first_step, who=who, why=why)
    session.flush()
    attempt = attempts.enrol(attempt.submission_id, enrolment_token=one_use, token=token, lease_s=lease_s)
    attempts.set_status(attempt, AttemptStatus.RUNNING, who=who, why=why)
    runs.set_status(run, RunStatus.RUNNING, legal=legal, who=who, why=why)
    QueueRepository(session).leave(run)
    return Begun(attempt, token)
