"""The seam to Ray: what the controller asks of whatever runs jobs. Tests put a fake here, and only here."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

# The submission ids that we give; whatever else runs on the cluster is not ours to touch.
SUBMISSION_ID: Final = re.compile(r"run-[a-z2-7]+-a[1-9][0-9]*")


class JobStatus(StrEnum):
    """Ray Jobs' words, lower case."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        return self not in (JobStatus.PENDING, JobStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class Job:
    """A Ray job as the cluster reports it."""

    submission_id: str
    status: JobStatus
    owner: str = ""
    """The store whose controller submitted it; empty where the cluster does not say."""
    message: str = ""
    error_type: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What it takes to start an attempt's driver."""

    submission_id: str
    owner: str
    controller_url: str
    enrolment_token: str = field(repr=False)
    home: str | None = None
    """Where workers keep checkpoints and logs; None leaves it to their own environment."""
    working_dir: str | None = None
    """Ray's name of the package that driver and workers run in; None where they need no code but ours."""


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    address: str
    gpus: float
    gpus_used: float | None
    """By anyone, as the cluster last counted; None where it does not say."""
    cpus: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class ClusterResources:
    nodes: tuple[Node, ...] = ()

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    @property
    def gpus_used(self) -> float:
        return sum(node.gpus_used or 0.0 for node in self.nodes)


class LauncherUnavailable(Exception):
    """The cluster cannot be reached now; nothing is known about what was asked."""


class LauncherStarting(LauncherUnavailable):
    """The cluster is this service's own, and not up yet."""


class JobRefused(Exception):
    """The cluster understood and said no; the message is its own."""


class Launcher(Protocol):
    """Starts, stops and lists jobs. Every call may raise LauncherUnavailable."""

    @property
    def description(self) -> str:
        """Where the cluster is, for messages and GET /cluster; without secrets."""

    async def submit(self, request: JobRequest) -> None:
        """Start a job; one that exists under this id already is taken as started.

        Raises:
            JobRefused: the cluster will not run it.
        """

    async def stop(self, submission_id: str) -> None:
        """End a job: SIGTERM at once, SIGKILL some seconds later. Unknown or ended ones are fine."""

    async def jobs(self, submission_ids: Collection[str]) -> Mapping[str, Job]:
        """Return those of these jobs that the cluster knows."""

    async def active_jobs(self) -> Mapping[str, Job]:
        """List the jobs that have not ended and whose ids are of our form."""

    async def prune(self, owner: str, *, keep: int, spare: Collection[str]) -> int:
        """Have the cluster forget ended jobs of a store, but for the newest; returns how many were forgotten.

        Args:
            owner: the store.
            keep: how many of its ended jobs stay.
            spare: jobs whose attempts are not settled yet: their end must still be read.
        """

    async def logs(self, submission_id: str) -> str | None:
        """Return what the job's driver printed; None where the job is unknown."""

    async def resources(self) -> ClusterResources:
        """Describe the nodes that are alive."""

    async def prepare(self) -> None:
        """Do what would make the first job slow; called once the cluster is first reached."""

    async def close(self) -> None:
        """Let go of connections. Jobs go on."""


def describe(resources: ClusterResources) -> list[dict[str, Any]]:
    """Return the nodes as JSON members."""
    return [
        {
            "id": node.id,
            "address": node.address,
            "gpus": node.gpus,
            "gpus_used": node.gpus_used,
            "cpus": node.cpus,
            "memory_bytes": node.memory_bytes,
        }
        for node in resources.nodes
    ]
