"""What the shell learns from a run: 0 trains, 3 another verdict, 1 failure, 130 stopped."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from muonscope.client import Run, RunFailure

TRAINS: Final = 0
FAILURE: Final = 1
OTHER_VERDICT: Final = 3
STOPPED: Final = 130


def exit_code(run: "Run") -> int:
    """Judge one finished run.

    A death that is itself the verdict is another verdict; a worker or a machine that failed is a failure,
    whatever the record showed until then.
    """
    from muonscope.contract.status import RunStatus, Verdict

    if run.status is RunStatus.STOPPED:
        return STOPPED
    if run.status is RunStatus.FAILED and (run.failure is None or not is_verdict(run.failure)):
        return FAILURE
    if run.verdict is None:
        return FAILURE
    return TRAINS if run.verdict.name is Verdict.TRAINS else OTHER_VERDICT


def is_verdict(failure: "RunFailure") -> bool:
    """Whether a run died of its numbers, which its verdict says, and not of what it ran on."""
    from muonscope.contract.status import FailureKind

    return failure.kind in (FailureKind.LOSS_SCALE_EXHAUSTED, FailureKind.NO_PROGRESS)


def worst(codes: Iterable[int]) -> int:
    """Fold many runs' codes: stopped before failure before another verdict before trains."""
    found = set(codes)
    return next((code for code in (STOPPED, FAILURE, OTHER_VERDICT) if code in found), TRAINS)
