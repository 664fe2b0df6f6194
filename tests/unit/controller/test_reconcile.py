"""The reconciler's table, over every combination of row and job."""

from itertools import product

import pytest

from muonscope.contract.attempts import Failure
from muonscope.contract.status import AttemptStatus, FailureKind
from service.controller.launcher import Job, JobStatus
from service.controller.reconcile import CloseAttempt, LiveAttempt, StopJob, failure_of, find_orphans, reconcile

NAME = "run-abc-a1"
BOOLEANS = (False, True)
# What Ray says: a job's status, "missing", or "away" when Ray itself cannot be reached.
SIGHTS = (*JobStatus, "missing", "away")


def settle(attempt: LiveAttempt, sight: JobStatus | str) -> tuple[list[str], list[CloseAttempt]]:
    jobs = None if sight == "away" else {NAME: Job(NAME, JobStatus(sight))} if sight in set(JobStatus) else {}
    actions = reconcile([attempt], jobs)
    stops = [action.submission_id for action in actions if isinstance(action, StopJob)]
    return stops, [action for action in actions if isinstance(action, CloseAttempt)]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(
    ("enrolled", "expired", "stop", "overdue"), list(product(BOOLEANS, BOOLEANS, BOOLEANS, BOOLEANS))
)
def test_every_row_and_job_settle_as_the_table_says(
    sight: JobStatus | str, enrolled: bool, expired: bool, stop: bool, overdue: bool
) -> None:
    attempt = LiveAttempt(NAME, enrolled, lease_expired=expired, stop_requested=stop, stop_overdue=overdue)
    stops, closed = settle(attempt, sight)
    is_live_job = sight in (JobStatus.PENDING, JobStatus.RUNNING)
    assert bool(stops) is (is_live_job and (stop or expired))
    assert [close.status for close in closed] == expected(sight, expired, stop, overdue)
    for close in closed:
        assert (close.failure is None) is (close.status is AttemptStatus.STOPPED)
        assert close.why


def expected(sight: JobStatus | str, expired: bool, stop: bool, overdue: bool) -> list[AttemptStatus]:
    if sight == "away":
        if stop and overdue:
            return [AttemptStatus.STOPPED]
        return [AttemptStatus.LOST] if expired else []
    if sight == "missing":
        return [AttemptStatus.STOPPED if stop else AttemptStatus.LOST]
    if sight in (JobStatus.PENDING, JobStatus.RUNNING):
        if stop:
            return [AttemptStatus.STOPPED] if overdue else []
        return [AttemptStatus.FAILED] if expired else []
    return [AttemptStatus.STOPPED if stop or sight is JobStatus.STOPPED else AttemptStatus.FAILED]


@pytest.mark.parametrize("sight", SIGHTS)
def test_an_attempt_whose_job_is_on_its_way_is_left_alone(sight: JobStatus | str) -> None:
    attempt = LiveAttempt(NAME, False, is_in_flight=True, lease_expired=True, stop_requested=True, stop_overdue=True)
    assert settle(attempt, sight) == ([], [])


@pytest.mark.parametrize(("stop", "status"), [(False, AttemptStatus.FAILED), (True, AttemptStatus.STOPPED)])
def test_a_refused_job_ends_its_attempt(stop: bool, status: AttemptStatus) -> None:
    refusal = Failure(kind=FailureKind.SETUP_FAILED, message="no")
    _, closed = settle(LiveAttempt(NAME, False, stop_requested=stop, refusal=refusal), "missing")
    assert [close.status for close in closed] == [status]


@pytest.mark.parametrize(("enrolled", "kind"), [(True, FailureKind.WORKER_STALLED), (False, FailureKind.SETUP_FAILED)])
def test_silence_is_named_by_how_far_the_attempt_came(enrolled: bool, kind: FailureKind) -> None:
    _, closed = settle(LiveAttempt(NAME, enrolled, lease_expired=True), JobStatus.RUNNING)
    assert closed[0].failure is not None
    assert closed[0].failure.kind is kind


@pytest.mark.parametrize(
    ("job", "enrolled", "kind"),
    [
        (Job(NAME, JobStatus.FAILED, error_type="RUNTIME_ENV_SETUP_FAILURE"), False, FailureKind.SETUP_FAILED),
        (Job(NAME, JobStatus.FAILED, error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), False, FailureKind.SETUP_FAILED),
        (Job(NAME, JobStatus.FAILED, error_type="JOB_SUPERVISOR_ACTOR_DIED"), True, FailureKind.JOB_LOST),
        (Job(NAME, JobStatus.SUCCEEDED, exit_code=0), True, FailureKind.RECORD_INCOMPLETE),
        (Job(NAME, JobStatus.FAILED, exit_code=-9), True, FailureKind.WORKER_DIED),
        (Job(NAME, JobStatus.FAILED, exit_code=1), True, FailureKind.WORKER_DIED),
        (Job(NAME, JobStatus.FAILED, message="No module named workers", exit_code=1), False, FailureKind.SETUP_FAILED),
        (Job(NAME, JobStatus.FAILED, message="torch.OutOfMemoryError: CUDA"), True, FailureKind.OUT_OF_MEMORY),
        (Job(NAME, JobStatus.FAILED, message="[Errno 28] No space left on device"), True, FailureKind.DISK_FULL),
    ],
)
def test_a_job_without_an_outcome_says_what_it_died_of(job: Job, enrolled: bool, kind: FailureKind) -> None:
    failure = failure_of(job, is_enrolled=enrolled)
    assert failure.kind is kind
    assert failure.message


def test_a_long_log_in_a_message_is_cut_to_its_end() -> None:
    failure = failure_of(Job(NAME, JobStatus.FAILED, message="x" * 50_000 + "the end"), is_enrolled=True)
    assert len(failure.message) == 20_000
    assert failure.message.endswith("the end")


def test_orphans_are_our_own_jobs_without_a_live_attempt() -> None:
    active = {
        "run-a-a1": Job("run-a-a1", JobStatus.RUNNING, owner="us"),
        "run-b-a1": Job("run-b-a1", JobStatus.RUNNING, owner="us"),
        "run-c-a1": Job("run-c-a1", JobStatus.RUNNING, owner="another service"),
    }
    assert find_orphans({"run-a-a1"}, active, owner="us") == {"run-b-a1"}
