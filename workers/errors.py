"""What can go wrong inside a job.

    WorkersError
    ├── ControllerAway          no answer, or one that says "later": try again
    ├── ControllerRefused       an answer that will not change
    │   └── AttemptSuperseded   a newer attempt owns the run: end at once, touch nothing
    ├── ConfigRefused           the run cannot be built as its spec says
    ├── ReleaseUnavailable      a DeepSpeed release could not be installed
    ├── TaskUnusable            the user's task does not import, or returns what no task returns
    ├── NoProgress              too many discarded steps in a row
    ├── WorkerDied              a rank's process is gone
    ├── WorkerStalled           no rank takes a new step; names the ones that are silent
    ├── SpoolFull               the node's disk has no room for the record
    ├── CheckpointUnusable      there is nothing whole to resume from
    └── CheckpointNotShared     ranks would write theirs to different disks

They cross Ray actors, so each survives pickling with its fields.
"""

from collections.abc import Sequence
from typing import Any


def _rebuild(kind: type["WorkersError"], message: str, fields: dict[str, Any]) -> "WorkersError":
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class WorkersError(Exception):
    """The root: every error of this package, with its facts as attributes."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class ControllerAway(WorkersError):
    """The controller did not answer, or asked to be left alone for a while."""

    retry_after_s: float | None

    def __init__(self, url: str, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"no answer from {url}: {reason}", url=url, reason=reason, retry_after_s=retry_after_s)


class ControllerRefused(WorkersError):
    """The controller answered with a refusal that repeating will not change."""

    status: int
    detail: str

    def __init__(self, url: str, status: int, detail: str) -> None:
        super().__init__(f"{url} answered {status}: {detail}", url=url, status=status, detail=detail)


class AttemptSuperseded(ControllerRefused):
    """A newer attempt owns this run."""


class ConfigRefused(WorkersError):
    """The run cannot be built as its spec says."""


class ReleaseUnavailable(WorkersError):
    """A DeepSpeed release could not be installed on a node."""

    version: str
    reason: str

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(
            f"DeepSpeed {version} cannot be installed: {reason}; see that pip reaches its index from the nodes, or run "
            f"`python -m workers.releases {version}` on each beforehand",
            version=version,
            reason=reason,
        )


class TaskUnusable(WorkersError):
    """The user's task does not import, or does not return what a task returns."""


class NoProgress(WorkersError):
    """The last `discarded_steps` steps in a row were thrown away."""

    step: int

    def __init__(self, step: int, discarded_steps: int) -> None:
        super().__init__(
            f"{discarded_steps} steps in a row were discarded, step {step} the last of them; "
            f"the run asked to end after stop_after_discarded_steps={discarded_steps}",
            step=step,
            discarded_steps=discarded_steps,
        )


class WorkerDied(WorkersError):
    """A rank's process ended without saying why."""

    rank: int

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"the worker of rank {rank} died: {reason}", rank=rank, reason=reason)


class WorkerStalled(WorkersError):
    """No rank took a new step in time."""

    silent_ranks: tuple[int, ...]
    step: int | None

    def __init__(self, silent_ranks: Sequence[int], step: int | None, silent_for_s: float, limit_s: float) -> None:
        where = "before the first step" if step is None else f"after step {step}"
        names = ", ".join(str(rank) for rank in silent_ranks)
        super().__init__(
            f"no new step from any rank in {silent_for_s:.0f} s (limit {limit_s:.0f} s), {where}; silent: rank {names}",
            silent_ranks=tuple(silent_ranks),
            step=step,
            silent_for_s=silent_for_s,
            limit_s=limit_s,
        )


class SpoolFull(WorkersError):
    """The disk that holds the spool is full."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot write {path}: {reason}; free some space on this node", path=path, reason=reason)


class CheckpointUnusable(WorkersError):
    """No whole checkpoint of ours is there to resume from."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot resume from {path}: {reason}", path=path, reason=reason)


class CheckpointNotShared(WorkersError):
    """The folder of checkpoints is another one on some ranks' nodes: parts on several disks make no checkpoint."""

    ranks: tuple[int, ...]

    def __init__(self, path: str, ranks: Sequence[int]) -> None:
        super().__init__(
            f"what rank 0 writes to {path} is not seen by rank {', '.join(map(str, ranks))}: it has to be on a file "
            "system that all nodes share; the service's MUONSCOPE_WORKERS_HOME names such a folder",
            path=path,
            ranks=tuple(ranks),
        )
