"""Exceptions into the contract's failure kinds, once; and which of several ranks' failures was the cause.

When one rank dies its peers fail too, inside the collective that waited for it. Those are consequences: they are
reported only when nothing better is known.
"""

import errno
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muonscope.contract.attempts import Failure
from muonscope.contract.status import FailureKind
from workers.errors import (
    CheckpointNotShared,
    CheckpointUnusable,
    ConfigRefused,
    NoProgress,
    ReleaseUnavailable,
    SpoolFull,
    TaskUnusable,
    WorkerDied,
    WorkersError,
    WorkerStalled,
)

MAX_MESSAGE: Final = 20_000

# By class name along the MRO, so that a driver without torch can translate too.
_KIND_BY_CLASS_NAME: Final = {
    "LossScaleExhausted": FailureKind.LOSS_SCALE_EXHAUSTED,
    "OutOfMemoryError": FailureKind.OUT_OF_MEMORY,
    "DeepSpeedConfigError": FailureKind.CONFIG_REFUSED,
    # muon_core's word for a set-up it does not support.
    "UnsupportedSetup": FailureKind.CONFIG_REFUSED,
}
_KIND_BY_CLASS: Final[dict[type[BaseException], FailureKind]] = {
    NoProgress: FailureKind.NO_PROGRESS,
    ConfigRefused: FailureKind.CONFIG_REFUSED,
    ReleaseUnavailable: FailureKind.SETUP_FAILED,
    TaskUnusable: FailureKind.TASK_ERROR,
    SpoolFull: FailureKind.DISK_FULL,
    CheckpointUnusable: FailureKind.CHECKPOINT_UNUSABLE,
    CheckpointNotShared: FailureKind.CHECKPOINT_UNUSABLE,
    WorkerDied: FailureKind.WORKER_DIED,
    WorkerStalled: FailureKind.WORKER_STALLED,
    MemoryError: FailureKind.OUT_OF_MEMORY,
}
_OUT_OF_MEMORY_TEXTS: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# What gloo and NCCL say on the ranks that outlive another one.
_PEER_LOST_TEXTS: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "gloo/transport",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Socket Timeout",
)

# Failures that a spec or its numbers explain, and no broken machine does.
VERDICT_BEARING: Final = frozenset({FailureKind.LOSS_SCALE_EXHAUSTED, FailureKind.NO_PROGRESS})

_GRAVITY: Final = (
    FailureKind.WORKER_DIED,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.DISK_FULL,
    FailureKind.CHECKPOINT_UNUSABLE,
    FailureKind.CONFIG_REFUSED,
    FailureKind.TASK_ERROR,
    FailureKind.LOSS_SCALE_EXHAUSTED,
    FailureKind.NO_PROGRESS,
    FailureKind.SETUP_FAILED,
    FailureKind.WORKER_STALLED,
    FailureKind.RECORD_INCOMPLETE,
    FailureKind.JOB_LOST,
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What ended one rank."""

    failure: Failure
    is_consequence: bool = False
    """Whether the rank only noticed that a peer was gone."""


def classify(error: BaseException, *, default: FailureKind = FailureKind.TASK_ERROR) -> FailureKind:
    """Return the kind of failure that `error` is; `default` is for what nothing here recognizes."""
    for kind, failure_kind in _KIND_BY_CLASS.items():
        if isinstance(error, kind):
            return failure_kind
    for ancestor in type(error).__mro__:
        if ancestor.__name__ in _KIND_BY_CLASS_NAME:
            return _KIND_BY_CLASS_NAME[ancestor.__name__]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailureKind.DISK_FULL
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return FailureKind.OUT_OF_MEMORY
    return default


def describe(
    error: BaseException, *, rank: int, step: int | None, default: FailureKind = FailureKind.TASK_ERROR
) -> RankFailure:
    """Translate what ended `rank` while it attempted `step`.

    Args:
        error: the exception, with its traceback.
        rank: the world rank it came from.
        step: the step being attempted, or None before the first.
        default: the kind of an exception that nothing here recognizes.
    """
    kind = classify(error, default=default)
    # Of ours alone: what another error calls a step need be none of the run's.
    at = getattr(error, "step", step) if isinstance(error, WorkersError) else step
    is_consequence = kind is default and is_peer_lost(error)
    expected = kind in VERDICT_BEARING or kind in (FailureKind.CONFIG_REFUSED, FailureKind.CHECKPOINT_UNUSABLE)
    message = f"{type(error).__name__}: {error}"
    if not expected:
        message += "\n" + "".join(traceback.format_exception(error))
    # A file's name that is no UTF-8 comes as surrogates, which no message can carry.
    message = message.encode("utf-8", "backslashreplace").decode()
    # A verdict is all ranks' alike: naming one would accuse it.
    accused = None if kind in VERDICT_BEARING else rank
    return RankFailure(Failure(kind=kind, rank=accused, step=at, message=message[:MAX_MESSAGE]), is_consequence)


def is_peer_lost(error: BaseException) -> bool:
    """Whether this is what a healthy rank sees when another one vanished."""
    if any(ancestor.__name__ == "DistNetworkError" for ancestor in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_LOST_TEXTS)


def root_cause(failures: Mapping[int, RankFailure]) -> Failure:
    """Choose the failure that explains the others; of equals, the lowest rank's.

    Args:
        failures: by world rank, at least one.
    """
    causes = {rank: failure for rank, failure in failures.items() if not failure.is_consequence} or failures
    rank = min(causes, key=lambda rank: (_GRAVITY.index(causes[rank].failure.kind), rank))
    cause = causes[rank].failure
    if causes[rank].is_consequence:
        return cause.model_copy(update={"kind": FailureKind.WORKER_DIED, "rank": None})
    return cause
