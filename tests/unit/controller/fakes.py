"""A cluster in memory behind the Launcher protocol, the one seam where the controller's tests put a fake."""

from collections.abc import Collection, Mapping

from service.controller.launcher import (
    ClusterResources,
    Job,
    JobRefused,
    JobRequest,
    JobStatus,
    LauncherUnavailable,
    Node,
)


class FakeLauncher:
    """Jobs are rows of a dict; a test moves them on by hand."""

    description = "a cluster in memory"

    def __init__(self, gpus: float = 2.0) -> None:
        self.gpus = gpus
        self.gpus_used: float | None = None
        self.rows: dict[str, Job] = {}
        self.requests: dict[str, JobRequest] = {}
        self.stopped: list[str] = []
        self.pruned: list[tuple[str, int, frozenset[str]]] = []
        self.prepared = 0
        self.is_reachable = True
        self.refusal: str | None = None
        self.loses_answers = False
        """Takes the job, and the answer is lost."""

    async def submit(self, request: JobRequest) -> None:
        self._reach()
        if self.refusal is not None:
            raise JobRefused(self.refusal)
        self.requests[request.submission_id] = request
        self.rows.setdefault(request.submission_id, Job(request.submission_id, JobStatus.RUNNING, owner=request.owner))
        if self.loses_answers:
            raise LauncherUnavailable("the answer was lost")

    async def stop(self, submission_id: str) -> None:
        self._reach()
        self.stopped.append(submission_id)

    async def jobs(self, submission_ids: Collection[str]) -> Mapping[str, Job]:
        self._reach()
        return {name: self.rows[name] for name in submission_ids if name in self.rows}

    async def active_jobs(self) -> Mapping[str, Job]:
        self._reach()
        return {name: job for name, job in self.rows.items() if not job.status.is_terminal}

    async def prune(self, owner: str, *, keep: int, spare: Collection[str]) -> int:
        self._reach()
        self.pruned.append((owner, keep, frozenset(spare)))
        return 0

    async def logs(self, submission_id: str) -> str | None:
        self._reach()
        return f"log of {submission_id}" if submission_id in self.rows else None

    async def resources(self) -> ClusterResources:
        self._reach()
        return ClusterResources((Node("node", "127.0.0.1", self.gpus, self.gpus_used, 2.0, 1e9),))

    async def prepare(self) -> None:
        self._reach()
        self.prepared += 1

    async def close(self) -> None:
        pass

    def end(self, submission_id: str, status: JobStatus, *, message: str = "", exit_code: int | None = None) -> None:
        """End a job as Ray would show it."""
        job = self.rows[submission_id]
        self.rows[submission_id] = Job(submission_id, status, job.owner, message, "", exit_code)

    def forget_all(self) -> None:
        """Restart the cluster: it knows no job any more."""
        self.rows.clear()

    def _reach(self) -> None:
        if not self.is_reachable:
            raise LauncherUnavailable("the cluster is away")
