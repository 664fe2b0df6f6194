"""The Launcher that speaks Ray's Jobs REST API, plain HTTP: this process is never a Ray driver and never imports ray.

    POST /api/jobs/            submit        GET /api/jobs/{id}/logs   what the driver printed
    POST /api/jobs/{id}/stop   stop          GET /api/v0/nodes         nodes that are alive and their totals
    GET  /api/jobs/[{id}]      status        GET /api/cluster_status   who uses how much, a few seconds old

Jobs carry no secret in their environment, which this API echoes. The one-use enrolment token is in a file for the
driver's eyes where the job runs on this machine; on another one's cluster it is on the command line, until it is spent.
"""

import asyncio
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from service.controller.launcher import (
    SUBMISSION_ID,
    ClusterResources,
    Job,
    JobRefused,
    JobRequest,
    JobStatus,
    LauncherStarting,
    LauncherUnavailable,
    Node,
)
from service.controller.token_files import TokenFiles

OWNER_METADATA: Final = "muonscope_store"
MAX_LOG_LENGTH: Final = 4 * 1024 * 1024
_PARALLEL_READS: Final = 16
# More jobs than this are read as one list, ended ones and all: it is cheaper than a request each.
_LISTED_FROM: Final = 32
_PRUNED_AT_ONCE: Final = 100
_ENROLMENT_TOKEN: Final = re.compile(r"(--enrolment-token[ =])\S+")
_TIMEOUT: Final = httpx.Timeout(10.0, connect=2.0)


class RayLauncher:
    """Jobs on the Ray cluster behind one dashboard URL."""

    def __init__(
        self,
        address: Callable[[], str | None],
        *,
        token: Callable[[], str | None] = lambda: None,
        environment: Mapping[str, str] | None = None,
        token_files: TokenFiles | None = None,
        python: str = sys.executable,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: gives the dashboard's URL, `http://host:8265`; None while a local Ray starts.
            token: gives Ray's token where it wants one; read anew for each request, for it may be replaced.
            environment: variables of driver and workers. A job without any needs no runtime environment, and its
                actors may take the workers that Ray keeps warm.
            token_files: where enrolment tokens are put for drivers on this machine; None: the cluster may be elsewhere.
            python: the interpreter on the cluster that has Muonscope installed.
            transport: for tests.
        """
        self._address = address
        self._token = token
        self._environment = dict(environment or {})
        self._token_files = token_files
        self._python = python
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, transport=transport, trust_env=False, follow_redirects=False)
        self._reads = asyncio.Semaphore(_PARALLEL_READS)

    @property
    def description(self) -> str:
        return self._address() or "a local Ray that is starting"

    async def submit(self, request: JobRequest) -> None:
        files = self._token_files
        file = None if files is None else files.write(request.submission_id, request.enrolment_token)
        body: dict[str, Any] = {
            "entrypoint": entrypoint(self._python, request, token_file=file),
            "submission_id": request.submission_id,
            "metadata": {OWNER_METADATA: request.owner},
        }
        runtime_env: dict[str, Any] = {"env_vars": self._environment} if self._environment else {}
        if request.working_dir is not None:
            runtime_env["working_dir"] = request.working_dir
        if runtime_env:
            body["runtime_env"] = runtime_env
        # The first job of a fresh cluster waits for its agent to become a driver.
        response = await self._send("POST", "/api/jobs/", json=body, timeout=30.0)
        if response.status_code == 400 and "already exists" in response.text:
            return
        if response.status_code != 200:
            raise JobRefused(f"Ray answered {response.status_code}: {response.text[-2000:]}")

    async def stop(self, submission_id: str) -> None:
        response = await self._send("POST", f"/api/jobs/{submission_id}/stop")
        if response.status_code not in (200, 404):
            raise LauncherUnavailable(f"Ray answered {response.status_code} to a stop: {response.text[-500:]}")

    async def jobs(self, submission_ids: Collection[str]) -> Mapping[str, Job]:
        if len(submission_ids) > _LISTED_FROM:
            wanted = set(submission_ids)
            return {name: _job(row) for row in await self._list() if (name := _name(row)) in wanted}

        async def read(submission_id: str) -> Job | None:
            async with self._reads:
                response = await self._send("GET", f"/api/jobs/{submission_id}")
            return None if response.status_code == 404 else _job(_object(response))

        found = await asyncio.gather(*(read(submission_id) for submission_id in submission_ids))
        return {job.submission_id: job for job in found if job is not None}

    async def active_jobs(self) -> Mapping[str, Job]:
        jobs = [_job(row) for row in await self._list()]
        return {job.submission_id: job for job in jobs if not job.status.is_terminal}

    async def prune(self, owner: str, *, keep: int, spare: Collection[str]) -> int:
        rows = sorted(await self._list(), key=lambda row: -float(row.get("end_time") or 0))
        ended = [job for row in rows if (job := _job(row)).status.is_terminal and job.owner == owner]
        old = [job.submission_id for job in ended if job.submission_id not in spare][keep:][:_PRUNED_AT_ONCE]
        for submission_id in old:
            await self._send("DELETE", f"/api/jobs/{submission_id}")
        return len(old)

    async def _list(self) -> list[dict[str, Any]]:
        """Return Ray's rows of the jobs whose ids are of our form."""
        rows = _json(await self._send("GET", "/api/jobs/"))
        if not isinstance(rows, list):
            raise LauncherUnavailable("Ray's list of jobs is not a list")
        return [row for row in rows if SUBMISSION_ID.fullmatch(_name(row))]

    async def logs(self, submission_id: str) -> str | None:
        response = await self._send("GET", f"/api/jobs/{submission_id}/logs")
        if response.status_code == 404:
            return None
        return _without_token(str(_object(response).get("logs") or "")[-MAX_LOG_LENGTH:])

    async def resources(self) -> ClusterResources:
        nodes, status = await asyncio.gather(
            self._send("GET", "/api/v0/nodes"), self._send("GET", "/api/cluster_status")
        )
        rows = (_object(nodes).get("data") or {}).get("result") or {}
        usage = _usage_by_node(_object(status))
        return ClusterResources(
            tuple(_node(row, usage) for row in rows.get("result") or [] if row.get("state") == "ALIVE")
        )

    async def prepare(self) -> None:
        """Have the head's agent become a Ray driver now: else the first job waits seconds for it."""
        summary = ((_object(await self._send("GET", "/nodes?view=summary")).get("data") or {}).get("summary")) or []
        for node in summary:
            raylet = node.get("raylet") or {}
            if not raylet.get("isHeadNode") or not raylet.get("dashboardAgentListenPort"):
                continue
            agent = f"http://{node.get('ip')}:{raylet['dashboardAgentListenPort']}"
            # Any job will do; the answer, that there is none of this name, comes after the agent has connected.
            await self._send("GET", f"{agent}/api/job_agent/jobs/warm-up/logs", timeout=30.0)

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, method: str, path: str, *, json: Any = None, timeout: float | None = None) -> httpx.Response:
        address = self._address()
        if address is None:
            raise LauncherStarting("the local Ray is starting")
        url = path if path.startswith("http://") else address.rstrip("/") + path
        try:
            token = self._token()
        except (OSError, UnicodeError) as error:
            raise LauncherUnavailable(f"Ray's token cannot be read: {error}") from error
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = _TIMEOUT if timeout is None else httpx.Timeout(timeout, connect=_TIMEOUT.connect)
        try:
            response = await self._client.request(method, url, json=json, headers=headers, timeout=limits)
        except (httpx.HTTPError, OSError) as error:
            raise LauncherUnavailable(f"Ray at {address} does not answer: {type(error).__name__}") from error
        if response.status_code in (401, 403):
            raise LauncherUnavailable(f"Ray at {address} refuses our token ({response.status_code})")
        if response.status_code >= 500:
            raise LauncherUnavailable(f"Ray at {address} answered {response.status_code}: {response.text[-500:]}")
        return response


def read_token(file: Path | None) -> str | None:
    """Read Ray's token from its file; None where there is none."""
    return file.read_text().strip() or None if file is not None else None


def entrypoint(python: str, request: JobRequest, *, token_file: Path | None = None) -> str:
    """Return the job's command line; `exec` leaves no shell between Ray's signals and the driver."""
    # One word: a token may begin with a dash, which would be taken for an option.
    by_word = f"--enrolment-token={request.enrolment_token}"
    words = [
        python, "-m", "workers.driver",
        "--controller", request.controller_url,
        "--attempt", request.submission_id,
        by_word if token_file is None else f"--enrolment-file={token_file}",
    ]  # fmt: skip
    if request.home is not None:
        words += ["--home", request.home]
    return "exec " + shlex.join(words)


def _without_token(text: str) -> str:
    """Hide the enrolment token where Ray repeats a job's command line: no reader needs it, spent or not."""
    return _ENROLMENT_TOKEN.sub(r"\1<hidden>", text)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise LauncherUnavailable(f"{response.request.url.path} answered something that is not JSON") from error


def _object(response: httpx.Response) -> Mapping[str, Any]:
    """Return an answer of Ray's own; a proxy before it may say something else."""
    document = _json(response)
    if response.status_code != 200 or not isinstance(document, dict):
        path = response.request.url.path
        raise LauncherUnavailable(f"{path} answered {response.status_code}: {response.text[-500:]}")
    return document


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("submission_id") or "")


def _job(row: Mapping[str, Any]) -> Job:
    return Job(
        submission_id=_name(row),
        status=JobStatus(str(row.get("status") or "").lower()),
        owner=str((row.get("metadata") or {}).get(OWNER_METADATA) or ""),
        message=_without_token(str(row.get("message") or "")),
        error_type=str(row.get("error_type") or ""),
        exit_code=row.get("driver_exit_code"),
    )


def _node(row: Mapping[str, Any], usage: Mapping[str, float]) -> Node:
    total = row.get("resources_total") or {}
    return Node(
        id=str(row.get("node_id")),
        address=str(row.get("node_ip")),
        gpus=float(total.get("GPU") or 0.0),
        gpus_used=usage.get(str(row.get("node_id"))),
        cpus=float(total.get("CPU") or 0.0),
        memory_bytes=float(total.get("memory") or 0.0),
    )


def _usage_by_node(status: Mapping[str, Any]) -> dict[str, float]:
    report = ((status.get("data") or {}).get("clusterStatus") or {}).get("loadMetricsReport") or {}
    by_node = report.get("usageByNode") or {}
    # The keys pass through Ray's camel-casing, which must be undone by what it leaves: case.
    return {str(node).lower(): float((usage.get("GPU") or [0.0])[0]) for node, usage in by_node.items()}
