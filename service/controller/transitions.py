"""Which status may follow which. The one table for runs and the one for attempts; the store refuses all else.

A run's retry, by policy or by a person, is its way back to `queued`: a terminal run that a person retries too.
"""

from collections.abc import Mapping
from typing import Final

from muonscope.contract.status import AttemptStatus, RunStatus

LEGAL: Final[Mapping[RunStatus, frozenset[RunStatus]]] = {
    RunStatus.QUEUED: frozenset({RunStatus.PENDING, RunStatus.STOPPED}),
    RunStatus.PENDING: frozenset({RunStatus.RUNNING, RunStatus.QUEUED, RunStatus.FAILED, RunStatus.STOPPED}),
    RunStatus.RUNNING: frozenset({RunStatus.QUEUED, RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.STOPPED}),
    RunStatus.SUCCEEDED: frozenset(),
    RunStatus.FAILED: frozenset({RunStatus.QUEUED}),
    RunStatus.STOPPED: frozenset({RunStatus.QUEUED}),
}

LEGAL_ATTEMPT: Final[Mapping[AttemptStatus, frozenset[AttemptStatus]]] = {
    AttemptStatus.PENDING: frozenset(AttemptStatus) - {AttemptStatus.PENDING},
    AttemptStatus.RUNNING: frozenset(AttemptStatus) - {AttemptStatus.PENDING, AttemptStatus.RUNNING},
    AttemptStatus.SUCCEEDED: frozenset(),
    AttemptStatus.FAILED: frozenset(),
    AttemptStatus.STOPPED: frozenset(),
    AttemptStatus.LOST: frozenset(),
}
