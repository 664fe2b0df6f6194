import pytest

from muonscope.contract.attempts import Failure
from muonscope.contract.status import FailureKind
from service.controller.retry_policy import RetryPolicy, backoff_s, retry_reason

POLICY = RetryPolicy(max_attempts=3, backoff_s=2.0)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_only_infrastructure_faults_are_retried(kind: FailureKind) -> None:
    reason = retry_reason(Failure(kind=kind), 1, POLICY)
    assert (reason is not None) is kind.is_infrastructure


def test_a_verdict_bearing_death_is_never_retried() -> None:
    assert retry_reason(Failure(kind=FailureKind.LOSS_SCALE_EXHAUSTED), 1, RetryPolicy(max_attempts=100)) is None


@pytest.mark.parametrize(("attempts", "again"), [(1, True), (2, True), (3, False), (4, False)])
def test_attempts_are_limited(attempts: int, again: bool) -> None:
    assert (retry_reason(Failure(kind=FailureKind.JOB_LOST), attempts, POLICY) is not None) is again


def test_an_attempt_without_a_failure_is_not_retried() -> None:
    assert retry_reason(None, 1, POLICY) is None


def test_the_pause_doubles_up_to_its_limit() -> None:
    assert [backoff_s(attempts, POLICY) for attempts in (0, 1, 2, 3)] == [0.0, 2.0, 4.0, 8.0]
    assert backoff_s(10_000, POLICY) == POLICY.max_backoff_s
