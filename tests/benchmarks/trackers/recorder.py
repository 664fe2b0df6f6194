"""One run recorded as a rank records it: spool, shipper process, HTTP, store. What the benchmarks measure."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from muonscope.contract.telemetry import StepRecord
from workers.controller_client import ControllerClient
from workers.shipper import is_shipper_alive, settle, start_detached
from workers.spool import Destination, Shipped, SpoolWriter

REPOSITORY: Final = Path(__file__).parents[3]
# A loaded machine takes minutes to import the service.
START_S: Final = 240.0


class Service:
    """A service process of its own, with its state in a folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{(self.home / 'port').read_text()}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, or start it again after a kill, and wait until it is ready."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.trackers.server", str(self.home)],
                cwd=REPOSITORY, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            assert self._process.poll() is None, (self.home / "service.log").read_text()
            assert time.monotonic() < deadline, "the service did not become ready"
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)

    def get(self, path: str) -> Any:
        return json.loads(self.read(path))

    def read(self, path: str) -> bytes:
        """Return the answer as it came."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    def spent_ms(self, path: str) -> float:
        """Return the milliseconds that the service says an answer took it."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            answer.read()
            return float(answer.headers["Server-Timing"].removeprefix("app;dur="))

    def post(self, path: str, document: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(document).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def is_ready(self) -> bool:
        """Whether it takes runs: ours or one that an earlier process left behind."""
        try:
            return bool(self.get("/readyz"))
        except (OSError, urllib.error.URLError):
            return False


class Recorder:
    """Records a run's steps through the spool, with its shipper beside it."""

    def __init__(self, service: Service, name: str = "run-0", *, steps: int = 10_000_000) -> None:
        """Submit the run, enrol as its worker group and start shipping."""
        run = service.post("/runs", {"name": name, "steps": steps, "world_size": 1})
        self.run_id: str = run["id"]
        attempt_id = f"run-{self.run_id}-a1"
        job = service.home / "jobs" / attempt_id
        deadline = time.monotonic() + START_S
        while not job.exists():
            assert time.monotonic() < deadline, "the run was not started"
            time.sleep(0.02)
        client = ControllerClient(service.url, attempt_id)
        enrolled = json.loads(
            client.post("enrol", json.dumps({"token": json.loads(job.read_text())["token"]}).encode())
        )
        client.close()
        self.directory = service.home / "spool" / self.run_id
        destination = Destination(service.url, attempt_id, enrolled["token"], enrolled["epoch"])
        self.spool = SpoolWriter(self.directory, destination)
        self.ship()

    def ship(self) -> None:
        """Start a shipper if none is at work, as the worker does every second."""
        if not is_shipper_alive(self.directory):
            start_detached(self.directory)

    def record(self, record: StepRecord) -> None:
        self.spool.append(record)

    def wait_until_stored(self, patience_s: float = 300.0) -> None:
        """Wait until the controller has acknowledged every record."""
        deadline = time.monotonic() + patience_s
        while Shipped.read(self.directory).records < self.spool.records:
            assert time.monotonic() < deadline, Shipped.read(self.directory)
            time.sleep(0.002)


def settle_spool(directory: Path, patience_s: float = 60.0) -> int:
    """Ship what is left, as the driver does once its ranks are gone; return how many records the spool held."""
    settled = settle(directory, patience_s)
    assert settled.is_complete, settled
    return settled.declared


def shipper_pids(directory: Path) -> list[int]:
    """Return the shipper processes of a spool."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"workers.shipper" in command and os.fsencode(directory) in command:
            found.append(int(entry.name))
    return found
