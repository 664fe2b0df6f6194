"""The words: which faults may be tried again, and the order of gravity."""

from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus, Verdict


def test_a_death_that_bears_a_verdict_is_never_infrastructure() -> None:
    verdict_bearing = {
        FailureKind.LOSS_SCALE_EXHAUSTED,
        FailureKind.NO_PROGRESS,
        FailureKind.TASK_ERROR,
        FailureKind.CONFIG_REFUSED,
        FailureKind.CHECKPOINT_UNUSABLE,
        FailureKind.DISK_FULL,
    }

    assert {kind for kind in FailureKind if not kind.is_infrastructure} == verdict_bearing


def test_the_verdicts_stand_gravest_first() -> None:
    assert list(Verdict) == ["dies", "poisoned", "diverged", "stalled", "absorbed", "inconclusive", "trains"]


def test_a_terminal_status_is_one_that_nothing_follows() -> None:
    assert {status for status in RunStatus if not status.is_terminal} == {"queued", "pending", "running"}
    assert {status for status in AttemptStatus if not status.is_terminal} == {"pending", "running"}
