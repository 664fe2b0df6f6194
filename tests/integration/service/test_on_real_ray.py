"""The whole path on a real local Ray: `muonscope up`, real drivers, real actors, real training.

One service and one Ray for the module; the tests run in order and the last one ends both.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.controller.local_ray import end_head, find_processes, free_ports

# Trains for as long as it is asked to, without overflow.
STEADY: dict[str, Any] = {"precision": "fp32", "optimizer": {"lr": 0.0001}}
REPOSITORY = Path(__file__).resolve().parents[3]


class Installation:
    """A MUONSCOPE_HOME with a service that can be killed and started again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_ports(1)[0]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "MUONSCOPE_HOME": str(self.home), "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "muonscope.cli.main", "up", "--port", str(self.port), "--gpus", "2"]
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.home)
        self.wait(lambda: self.is_ready(), 120, "the service is ready")

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def wait(self, condition: Any, limit_s: float, what: str) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit_s, f"not within {limit_s} s: {what}\n{self.log()}"
            time.sleep(0.05)
        return time.monotonic() - began

    def submit(self, **spec: Any) -> str:
        response = self.client.post("/runs", json={"world_size": 2, "optimizer": {"lr": 0.05}, **spec})
        assert response.status_code == 201, response.text
        run_id: str = response.json()["id"]
        return run_id

    def run(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.client.get(f"/runs/{run_id}").json()
        return run

    def wait_for(self, run_id: str, *statuses: str, limit_s: float = 90) -> dict[str, Any]:
        self.wait(lambda: self.run(run_id)["status"] in statuses, limit_s, f"{run_id} is {statuses}")
        return self.run(run_id)

    def head_id(self) -> str:
        head: dict[str, Any] = json.loads((self.home / "ray" / "head.json").read_text())
        return str(head["id"])

    def drivers(self, run_id: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(f"run-{run_id}-" in part for part in process.info["cmdline"] or []):
                found.append(process)
        return found

    def log(self) -> str:
        return (self.home / "up.log").read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    one = Installation(tmp_path_factory.mktemp("home"))
    one.start()
    yield one
    if one.process is not None and one.process.poll() is None:
        one.process.kill()
        one.process.wait()
    head = one.home / "ray" / "head.json"
    if head.exists():
        end_head(one.head_id())
    one.client.close()


def test_a_submitted_run_trains_and_its_record_is_complete(installation: Installation) -> None:
    run_id = installation.submit(steps=30)
    run = installation.wait_for(run_id, "succeeded", "failed", "stopped")
    assert (run["status"], run["verdict"]["name"]) == ("succeeded", "trains"), run["failure"]
    steps = installation.client.get(f"/runs/{run_id}/steps").json()["steps"]
    assert [step["step"] for step in steps] == list(range(30))
    attempt = run["attempts"][0]
    phases = ["submitted", "job_submitted", "driver_started", "enrolled", "workers_started", "first_step", "finished"]
    times = [attempt["phases"][phase] for phase in phases]
    assert times == sorted(times)
    assert [rank["rank"] for rank in attempt["ranks"]] == [0, 1]
    assert "enrolment" not in json.dumps(run)
    assert installation.client.get(f"/runs/{run_id}/logs").status_code == 200


def test_rays_own_api_wants_its_token(installation: Installation) -> None:
    address = installation.client.get("/cluster").json()["address"]
    assert address.startswith("http://127.0.0.1:")
    assert httpx.get(f"{address}/api/jobs/", trust_env=False).status_code == 401


def test_a_stopped_run_ends_and_frees_its_gpus_within_five_seconds(installation: Installation) -> None:
    run_id = installation.submit(steps=100_000, **STEADY)
    installation.wait(lambda: installation.run(run_id)["summary"]["steps"] > 0, 90, "it trains")
    assert installation.drivers(run_id)
    assert installation.client.post(f"/runs/{run_id}/stop").status_code == 202
    took = installation.wait(lambda: installation.run(run_id)["status"] == "stopped", 30, "stopped")
    gone = took + installation.wait(lambda: not installation.drivers(run_id), 30, "its driver is gone")
    assert gone < 5.0
    # The GPUs are free when the next run can have them.
    following = installation.submit(steps=3)
    assert installation.wait_for(following, "succeeded", "failed")["status"] == "succeeded"


def test_a_killed_controller_loses_nothing_and_adopts_the_run(installation: Installation) -> None:
    run_id = installation.submit(steps=300, **STEADY)
    installation.wait(lambda: installation.run(run_id)["summary"]["steps"] > 0, 90, "it trains")
    assert installation.process is not None
    installation.process.send_signal(signal.SIGKILL)
    installation.process.wait()
    head = installation.head_id()
    assert installation.drivers(run_id)
    time.sleep(2)
    installation.start()
    assert installation.head_id() == head
    run = installation.wait_for(run_id, "succeeded", "failed", "stopped")
    assert run["status"] == "succeeded", run["failure"]
    assert [attempt["number"] for attempt in run["attempts"]] == [1]
    steps = installation.client.get(f"/runs/{run_id}/steps?limit=10000").json()["steps"]
    assert [step["step"] for step in steps] == list(range(300))


def final_record(installation: Installation, run: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's steps without what no two runs share."""
    steps = installation.client.get(f"/runs/{run['id']}/steps?limit=10000").json()["steps"]
    return [{key: value for key, value in step.items() if key not in ("attempt", "step_time_s")} for step in steps]


def test_a_run_whose_rank_was_killed_resumes_and_ends_with_the_bits_of_the_uninterrupted_one(
    installation: Installation,
) -> None:
    spec: dict[str, Any] = {
        "steps": 240,
        "task": {"name": "simple_model", "fixed_batch": False},
        "loss_scale": {"initial_power": 20, "window": 50},
        "checkpoint": {"every_steps": 40, "keep": 2},
    }
    whole = installation.wait_for(installation.submit(**spec), "succeeded", "failed", "stopped")
    run_id = installation.submit(**spec)

    def checkpoints() -> list[int]:
        events = installation.client.get(f"/runs/{run_id}/events").json()["events"]
        return [event["detail"]["step"] for event in events if event["kind"] == "checkpoint"]

    installation.wait(lambda: len(checkpoints()) >= 2, 90, "two checkpoints are reported")
    os.kill(installation.run(run_id)["attempts"][0]["ranks"][1]["pid"], signal.SIGKILL)
    resumed = installation.wait_for(run_id, "succeeded", "failed", "stopped")

    first, second = resumed["attempts"]
    assert (first["status"], first["failure"]["kind"], first["failure"]["rank"]) == ("failed", "worker_died", 1)
    assert second["first_step"] in checkpoints()
    assert second["first_step"] >= 80
    assert second["declared_steps"] == 240 - second["first_step"]
    assert whole["summary"]["discarded"] > 0
    assert resumed["verdict"]["name"] == whole["verdict"]["name"] == "trains"
    assert final_record(installation, resumed) == final_record(installation, whole)
    assert second["final"]["final_parameters_hash"] == whole["attempts"][0]["final"]["final_parameters_hash"]
    assert resumed["summary"] == whole["summary"]
    kept = sorted(path.name for path in (installation.home / "checkpoints" / run_id).iterdir())
    assert kept == ["step-00000200", "step-00000240"]


def test_a_run_outlives_rays_head_and_its_logs_do_too(installation: Installation) -> None:
    run_id = installation.submit(steps=3000, checkpoint={"every_steps": 100}, **STEADY)
    installation.wait(lambda: installation.run(run_id)["summary"]["steps"] > 150, 90, "it trains past a checkpoint")
    head = json.loads((installation.home / "ray" / "head.json").read_text())

    os.kill(int(head["vital"]["gcs"][0]), signal.SIGKILL)

    left = installation.wait(lambda: installation.run(run_id)["status"] != "running", 90, "the attempt is given up")
    assert left < 90
    lost = installation.run(run_id)["attempts"][0]
    assert (lost["status"], lost["failure"]["kind"]) in {("lost", "job_lost"), ("failed", "worker_died")}
    assert installation.client.get(f"/runs/{run_id}/logs?attempt=1&rank=0").status_code == 200
    installation.wait(lambda: installation.run(run_id)["status"] == "running", 90, "another attempt trains")
    second = installation.run(run_id)["attempts"][1]
    assert second["first_step"] >= 100
    installation.client.post(f"/runs/{run_id}/stop")
    installation.wait_for(run_id, "stopped")


def test_a_clean_end_is_zero_and_leaves_no_process(installation: Installation) -> None:
    head = installation.head_id()
    assert installation.process is not None
    installation.process.send_signal(signal.SIGTERM)
    assert installation.process.wait(30) == 0, installation.log()
    assert find_processes(head) == []
