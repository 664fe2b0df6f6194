"""Make rows match Ray: which attempts are over without having said so, which jobs must stop. Pure.

                         job pending, running     job ended              no such job       Ray unreachable
    attempt in flight    wait                     wait                   wait              wait
    attempt live         adopt                    close: see below       close: lost       wait
      … stop requested   stop; close when overdue close: stopped         close: stopped    close when overdue
      … lease is out     stop; close: stalled     close: see below       close: lost       close: lost
    no live attempt      stop, on a second look   nothing                -                 -

A driver posts its outcome before it exits, so a job that has ended without one has crashed: its exit and message say
how. A job that someone else stopped (`ray job stop`) is a stopped run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muonscope.contract.attempts import Failure
from muonscope.contract.status import AttemptStatus, FailureKind
from service.controller.launcher import Job, JobStatus

MAX_MESSAGE_LENGTH: Final = 20_000


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    """An attempt without an outcome, as its row and the controller's memory show it."""

    submission_id: str
    is_enrolled: bool
    is_in_flight: bool = False
    """Submitted too recently for the list of jobs to show it."""
    lease_expired: bool = False
    stop_requested: bool = False
    stop_overdue: bool = False
    """Its workers have had their grace to report the stop."""
    refusal: Failure | None = None
    """Why its job could not be submitted."""


@dataclass(frozen=True, slots=True)
class CloseAttempt:
    """End an attempt that will not report an outcome."""

    submission_id: str
    status: AttemptStatus
    why: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StopJob:
    submission_id: str
    why: str


Action = CloseAttempt | StopJob


def reconcile(attempts: Sequence[LiveAttempt], jobs: Mapping[str, Job] | None) -> list[Action]:
    """Compare live attempts with their Ray jobs and say what must be done.

    Args:
        attempts: every attempt whose row has no end.
        jobs: Ray's, observed before the rows were read; None where Ray cannot be reached.
    """
    return [action for attempt in attempts for action in _settle(attempt, jobs)]


def fallen_silent(submission_id: str) -> CloseAttempt:
    """End the record of a script of somebody's own: it has no job to ask, and nobody may start it again."""
    message = "the script gave no sign of life until its lease ran out: its node or the way to it is gone"
    failure = Failure(kind=FailureKind.WORKER_DIED, message=message)
    return CloseAttempt(submission_id, AttemptStatus.LOST, message, failure)


def find_orphans(live: Collection[str], active: Mapping[str, Job], *, owner: str) -> frozenset[str]:
    """Return the jobs of ours that run although no live attempt owns them.

    A driver that has just reported its outcome is still exiting: stop only what two looks, some seconds apart, found.

    Args:
        live: submission ids of live attempts.
        active: Ray's jobs that have not ended.
        owner: our store; another store's jobs are not ours to stop.
    """
    return frozenset(name for name, job in active.items() if job.owner == owner and name not in live)


def _settle(attempt: LiveAttempt, jobs: Mapping[str, Job] | None) -> list[Action]:
    name = attempt.submission_id
    if attempt.refusal is not None:
        if attempt.stop_requested:
            return [CloseAttempt(name, AttemptStatus.STOPPED, "stopped before its job was taken")]
        return [CloseAttempt(name, AttemptStatus.FAILED, "its job was not taken", attempt.refusal)]
    if attempt.is_in_flight:
        return []
    if jobs is None:
        return _settle_unseen(attempt)
    job = jobs.get(name)
    if job is None:
        return [_vanished(attempt)]
    if job.status.is_terminal:
        return [_ended(attempt, job)]
    if attempt.stop_requested:
        stop = StopJob(name, "the run was asked to stop")
        overdue = CloseAttempt(name, AttemptStatus.STOPPED, "stopped; its workers did not report in time")
        return [stop, overdue] if attempt.stop_overdue else [stop]
    if attempt.lease_expired:
        return [StopJob(name, "its lease ran out"), _silent(attempt)]
    return []


def _settle_unseen(attempt: LiveAttempt) -> list[Action]:
    name = attempt.submission_id
    if attempt.stop_requested and attempt.stop_overdue:
        return [CloseAttempt(name, AttemptStatus.STOPPED, "stopped while Ray was not reachable")]
    if attempt.lease_expired:
        message = "the attempt fell silent and Ray is not reachable"
        return [CloseAttempt(name, AttemptStatus.LOST, message, Failure(kind=FailureKind.JOB_LOST, message=message))]
    return []


def _vanished(attempt: LiveAttempt) -> CloseAttempt:
    if attempt.stop_requested:
        return CloseAttempt(attempt.submission_id, AttemptStatus.STOPPED, "stopped; Ray no longer knows its job")
    message = "Ray does not know the attempt's job: it was never taken, or Ray was restarted"
    failure = Failure(kind=FailureKind.JOB_LOST, message=message)
    return CloseAttempt(attempt.submission_id, AttemptStatus.LOST, message, failure)


def _silent(attempt: LiveAttempt) -> CloseAttempt:
    if attempt.is_enrolled:
        kind, message = FailureKind.WORKER_STALLED, "the worker group gave no sign of life until its lease ran out"
    else:
        kind, message = FailureKind.SETUP_FAILED, "the job's driver did not enrol in time"
    return CloseAttempt(attempt.submission_id, AttemptStatus.FAILED, message, Failure(kind=kind, message=message))


def _ended(attempt: LiveAttempt, job: Job) -> CloseAttempt:
    name = attempt.submission_id
    if attempt.stop_requested or job.status is JobStatus.STOPPED:
        return CloseAttempt(name, AttemptStatus.STOPPED, "its job was stopped")
    failure = failure_of(job, is_enrolled=attempt.is_enrolled)
    return CloseAttempt(name, AttemptStatus.FAILED, "its job ended without an outcome", failure)


def failure_of(job: Job, *, is_enrolled: bool) -> Failure:
    """Read from a job that ended without an outcome what kind of failure it was."""
    exit_text = "" if job.exit_code is None else f" with code {job.exit_code}"
    message = job.message[-MAX_MESSAGE_LENGTH:] or f"the job {job.status}{exit_text} without reporting an outcome"
    return Failure(kind=_kind_of(job, is_enrolled=is_enrolled), message=message)


# Ray's JobErrorType words; the driver's own exit is told apart by its code.
_SETUP: Final = ("RUNTIME_ENV", "START_TIMEOUT", "START_FAILURE", "UNSCHEDULABLE", "START_ERROR")
_SIGKILL_EXITS: Final = (-9, 137)


def _kind_of(job: Job, *, is_enrolled: bool) -> FailureKind:
    error = job.error_type.upper()
    if any(word in error for word in _SETUP):
        return FailureKind.SETUP_FAILED
    if "ACTOR_DIED" in error or "UNKNOWN_FAILURE" in error:
        return FailureKind.JOB_LOST
    if job.status is JobStatus.SUCCEEDED:
        return FailureKind.RECORD_INCOMPLETE
    if "No space left on device" in job.message:
        return FailureKind.DISK_FULL
    if "OutOfMemoryError" in job.message or "oom" in job.message.lower().split():
        return FailureKind.OUT_OF_MEMORY
    if job.exit_code in _SIGKILL_EXITS:
        return FailureKind.WORKER_DIED
    return FailureKind.WORKER_DIED if is_enrolled else FailureKind.SETUP_FAILED
