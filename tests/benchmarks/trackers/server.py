"""The service over a cluster that runs nothing: the benchmark itself is every attempt's worker group.

    python -m tests.benchmarks.trackers.server HOME

It writes its port to HOME/port, and each attempt's way in to HOME/jobs/<submission id>.
"""

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from service.app import create_app
from service.controller.launcher import ClusterResources, Job, JobRequest, JobStatus, Node
from service.serve import Server, bind
from service.settings import Settings


class FolderLauncher:
    """Jobs are files of a folder: they run for ever, and outlive the controller."""

    description = "a folder of jobs"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    async def submit(self, request: JobRequest) -> None:
        path = self._folder / request.submission_id
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps({"token": request.enrolment_token, "owner": request.owner}))
        beside.replace(path)

    async def stop(self, submission_id: str) -> None:
        (self._folder / submission_id).unlink(missing_ok=True)

    async def jobs(self, submission_ids: Collection[str]) -> Mapping[str, Job]:
        running = await self.active_jobs()
        return {name: running[name] for name in submission_ids if name in running}

    async def active_jobs(self) -> Mapping[str, Job]:
        files = [path for path in self._folder.iterdir() if not path.suffix]
        return {path.name: Job(path.name, JobStatus.RUNNING, json.loads(path.read_text())["owner"]) for path in files}

    async def prune(self, owner: str, *, keep: int, spare: Collection[str]) -> int:
        return 0

    async def logs(self, submission_id: str) -> str | None:
        return None

    async def resources(self) -> ClusterResources:
        return ClusterResources((Node("node", "127.0.0.1", 64.0, None, 2.0, 1e9),))

    async def prepare(self) -> None:
        return None

    async def close(self) -> None:
        return None


def main() -> None:
    home = Path(sys.argv[1])
    kept = home / "port"
    listener = bind("127.0.0.1", int(kept.read_text()) if kept.exists() else 0)
    port = int(listener.getsockname()[1])
    # Started again after a kill, it answers where the workers look for it.
    kept.write_text(str(port))
    settings = Settings(home=home, port=port, lease_s=3600.0, tick_s=0.2)
    Server(create_app(settings, FolderLauncher(home / "jobs"))).run(sockets=[listener])


if __name__ == "__main__":
    main()
