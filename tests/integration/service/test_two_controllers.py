"""Two controllers on one PostgreSQL: one leads; stopped or killed, the other takes over and repeats nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.service.fake_ray import FakeRay, fake_ray
from tests.ports import hold_port, number_of
from tests.postgres import fresh_database, server

REPOSITORY = Path(__file__).resolve().parents[3]
# A lease is ten seconds and the promise fifteen; the rest is for a machine that does much else meanwhile.
TAKE_OVER_S = 45.0
LIMIT_S = 120.0


class Controller:
    """`muonscope up` as a process of its own."""

    def __init__(self, home: Path, database_url: str, ray: FakeRay) -> None:
        home.mkdir()
        self._held = hold_port()
        self.port = number_of(self._held)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False, verify=False)
        self.log = home / "up.log"
        command = [sys.executable, "-m", "muonscope.cli.main", "up", "--port", str(self.port)]
        command += ["--database-url", database_url, "--ray-address", ray.address]
        environment = {**os.environ, "MUONSCOPE_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)

    def readiness(self) -> tuple[int, str]:
        assert self.process.poll() is None, self.log.read_text()
        try:
            answer = self.client.get("/readyz")
        except httpx.TransportError:
            return 0, "not listening"
        return answer.status_code, answer.text

    def wait_until(self, status: int, text: str = "", limit_s: float = LIMIT_S) -> float:
        began = time.monotonic()
        while (found := self.readiness())[0] != status or text not in found[1]:
            assert time.monotonic() - began < limit_s, f"{found}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)
        return time.monotonic() - began

    def submit(self) -> str:
        answer = self.client.post("/runs", json={"world_size": 1})
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["id"]
        return run_id

    def runs(self) -> dict[str, dict[str, Any]]:
        return {run["id"]: run for run in self.client.get("/runs?limit=100").json()["runs"]}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.client.close()
        self._held.close()


@pytest.fixture
def place() -> Iterator[tuple[str, FakeRay]]:
    with server() as url, fresh_database(url) as database_url, fake_ray(gpus=2.0) as ray:
        yield database_url, ray


def settled(ray: FakeRay, controller: Controller, submitted: int) -> dict[str, dict[str, Any]]:
    """Wait until two runs hold the two GPUs and the rest say why they wait."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        runs = controller.runs()
        waiting = [run for run in runs.values() if run["waiting_reason"]]
        if len(runs) == submitted and len(ray.jobs) >= 2 and len(waiting) == submitted - 2:
            return runs
        assert time.monotonic() < deadline, (runs, ray.jobs)
        time.sleep(0.05)


def test_the_other_controller_takes_over_and_nothing_is_submitted_twice(
    place: tuple[str, FakeRay], tmp_path: Path
) -> None:
    database_url, ray = place
    with ExitStack() as stack:
        first = Controller(tmp_path / "first", database_url, ray)
        stack.callback(first.end)
        first.wait_until(200)
        second = Controller(tmp_path / "second", database_url, ray)
        stack.callback(second.end)
        second.wait_until(503, f"standing by: http://127.0.0.1:{first.port} leads")
        for _ in range(3):
            first.submit()
        before = settled(ray, first, 3)

        # The one that stands by shows all and takes nothing.
        assert second.runs().keys() == before.keys()
        assert second.client.post("/runs", json={}).status_code == 503
        # Workers are told of both.
        assert all(f":{port}" in job["entrypoint"] for job in ray.jobs.values() for port in (first.port, second.port))

        # Stopped, not dead: nothing but its lease says so.
        first.signal(signal.SIGSTOP)
        assert second.wait_until(200) < TAKE_OVER_S
        second.submit()
        settled(ray, second, 4)
        first.signal(signal.SIGCONT)
        first.wait_until(503, f"standing by: http://127.0.0.1:{second.port} leads")

        second.signal(signal.SIGKILL)
        assert first.wait_until(200) < TAKE_OVER_S
        first.submit()
        after = settled(ray, first, 5)

        assert set(ray.submissions.values()) == {1}
        assert {name.split("-")[1] for name in ray.submissions} == set(list(reversed(after))[:2])
        assert [len(run["attempts"]) for run in reversed(after.values())] == [1, 1, 0, 0, 0]
