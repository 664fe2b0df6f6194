"""A Ray cluster of this test's own: free ports, own folder, ended by process id."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[3]
START_LIMIT_S = 180.0


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on right now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class LocalRay:
    """A one-node cluster with logical GPUs, seen through its Jobs API."""

    def __init__(self, num_gpus: int = 2, num_cpus: int = 4, environment: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="msray-"))
        gcs, dashboard, agent, agent_grpc, metrics, client, node, objects = free_ports(8)
        self.address = f"127.0.0.1:{gcs}"
        self._dashboard = f"http://127.0.0.1:{dashboard}"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
        command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--dashboard-port={dashboard}"]
        command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
        command += [f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}"]
        command += [f"--node-manager-port={node}", f"--object-manager-port={objects}"]
        command += [f"--num-gpus={num_gpus}", f"--num-cpus={num_cpus}", f"--temp-dir={self._folder}"]
        command += ["--include-dashboard=true", "--disable-usage-stats", "--object-store-memory=80000000"]
        own = {"PYTHONPATH": str(REPOSITORY), "RAY_enable_metrics_collection": "false"}
        self._environment = {**os.environ, **own, **(environment or {})}
        self._environment.pop("RAY_ADDRESS", None)
        with (self._folder / "start.log").open("wb") as log:
            self._nodes = [
                subprocess.Popen(
                    command, env=self._environment, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
                )
            ]
        try:
            self._await_jobs_api()
        except BaseException:
            self.stop()
            raise

    def add_node(self, num_gpus: int) -> None:
        """Start a second node, on the same machine."""
        agent, agent_grpc, metrics, node, objects = free_ports(5)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={self.address}"]
        command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
        command += [f"--metrics-export-port={metrics}", "--node-ip-address=127.0.0.1"]
        command += [f"--node-manager-port={node}", f"--object-manager-port={objects}"]
        command += [f"--num-gpus={num_gpus}", "--num-cpus=2", "--disable-usage-stats"]
        command += ["--object-store-memory=80000000"]
        with (self._folder / "node.log").open("wb") as log:
            self._nodes.append(
                subprocess.Popen(
                    command, env=self._environment, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
                )
            )
        deadline = time.monotonic() + START_LIMIT_S
        while self.free_gpus() < num_gpus:
            assert time.monotonic() < deadline, (self._folder / "node.log").read_text()
            time.sleep(0.2)

    def idle_workers(self) -> list[int]:
        """Return the worker processes that wait for work."""
        return self.workers("ray::IDLE")

    def workers(self, title: str) -> list[int]:
        """Return the worker processes of this cluster that carry the title."""
        found = []
        for process in self._family():
            # One that ends while it is looked at is none.
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def submit(self, entrypoint: str, submission_id: str, env_vars: Mapping[str, str] | None = None) -> None:
        """Submit a Ray job."""
        body = {"entrypoint": entrypoint, "submission_id": submission_id, "runtime_env": {}}
        if env_vars:
            body["runtime_env"] = {"env_vars": dict(env_vars)}
        self._call("POST", "/api/jobs/", body)

    def stop_job(self, submission_id: str) -> None:
        self._call("POST", f"/api/jobs/{submission_id}/stop", {})

    def job_status(self, submission_id: str) -> str:
        return str(self._call("GET", f"/api/jobs/{submission_id}")["status"])

    def job_exit_code(self, submission_id: str) -> int | None:
        code = self._call("GET", f"/api/jobs/{submission_id}")["driver_exit_code"]
        return None if code is None else int(code)

    def job_logs(self, submission_id: str) -> str:
        return str(self._call("GET", f"/api/jobs/{submission_id}/logs")["logs"])

    def wait_for_job(self, submission_id: str, timeout_s: float = 240.0) -> str:
        """Wait for a job's end and return its status."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.job_status(submission_id)
            if status in ("SUCCEEDED", "FAILED", "STOPPED"):
                return status
            assert time.monotonic() < deadline, f"job {submission_id} is still {status}: {self.job_logs(submission_id)}"
            time.sleep(0.1)

    def free_gpus(self) -> float:
        """Return how many logical GPUs nobody holds."""
        status = self._call("GET", "/api/cluster_status")["data"]["clusterStatus"]
        used, total = (status.get("loadMetricsReport") or {}).get("usage", {}).get("GPU", (0, 0))
        return float(total - used)

    def stop(self) -> None:
        """End every process of this cluster, and remove its folder."""
        family = self._family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=60)
        for node in self._nodes:
            node.wait(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _family(self) -> list[psutil.Process]:
        family = []
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                head = psutil.Process(node.pid)
                family += [head, *head.children(recursive=True)]
        return family

    def _await_jobs_api(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self._call("GET", "/api/jobs/")
                return
            except OSError:
                log = (self._folder / "start.log").read_text()
                assert self._nodes[0].poll() is None, log
                assert time.monotonic() < deadline, log
                time.sleep(0.2)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._dashboard + path, data, headers, method=method)
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    return json.loads(response.read() or b"null")
            except ConnectionError:
                # Ray's dashboard now and then closes a connection unanswered; what only reads is asked for again.
                if method != "GET" or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
