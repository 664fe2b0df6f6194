"""A service of the test's own, as a process that can be stopped, killed and started again."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from muonscope.contract.telemetry import StepRecord
from service.controller.local_ray import end_head
from tests.documented import hold_to_document
from tests.integration.service.fake_ray import FakeRay
from tests.ports import hold_port, number_of
from workers.controller_client import ControllerClient
from workers.errors import WorkersError
from workers.shipper import start_detached
from workers.spool import Destination, SpoolWriter, remove_spool, spool_directory

REPOSITORY = Path(__file__).resolve().parents[1]
UP = ("muonscope.cli.main",)
# The machine may be busy with other things; what is promised to be quicker says so itself.
LIMIT_S = 180.0
# Ray and what a fork server imports, on a machine that does much else.
START_LIMIT_S = 240.0
ENDED = ("succeeded", "failed", "stopped")
# Trains for as long as it is asked to, without overflow.
STEADY: dict[str, Any] = {"precision": "fp32", "optimizer": {"lr": 0.0001}}


class Installation:
    """A MUONSCOPE_HOME, an address, and the service that runs there now."""

    def __init__(
        self,
        home: Path,
        *,
        ray: FakeRay | None = None,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            home: state is kept here.
            ray: the cluster; None has the service start a real one of two logical GPUs.
            settings: of the service, by their names.
            environment: further variables of its process.
        """
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.ray = home, ray
        # Kept until the end: the service may be started late, and again.
        self._held = hold_port()
        self.port = number_of(self._held)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=False)
        self.client.event_hooks = {"response": [hold_to_document]}
        self.process: subprocess.Popen[bytes] | None = None
        own = {f"MUONSCOPE_{name.upper()}": str(value) for name, value in (settings or {}).items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MUONSCOPE_")}
        self.environment = {**kept, "MUONSCOPE_HOME": str(home), "PYTHONPATH": str(REPOSITORY), **own}
        self.environment |= environment or {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- its process -------------------------------------------------------------------------------------------------

    def spawn(self, module: Sequence[str] = UP) -> "subprocess.Popen[bytes]":
        """Start the service's process, or another module that becomes it, and wait for nothing."""
        command = [sys.executable, "-m", *module, "up", "--port", str(self.port)]
        command += ["--gpus", "2"] if self.ray is None else ["--ray-address", self.ray.address]
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self.home)
        return self.process

    def start(self, module: Sequence[str] = UP) -> None:
        self.spawn(module)
        self.wait(self.is_ready, START_LIMIT_S, "the service is ready")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """End all that was started here."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()
        if (self.home / "ray" / "head.json").exists():
            end_head(self.head_id())
        self.client.close()
        self._held.close()

    def head(self) -> dict[str, Any]:
        """What the service remembers of its Ray head."""
        head: dict[str, Any] = json.loads((self.home / "ray" / "head.json").read_text())
        return head

    def head_id(self) -> str:
        return str(self.head()["id"])

    def log(self) -> str:
        return (self.home / "up.log").read_text(errors="replace")[-4000:]

    # -- its runs ----------------------------------------------------------------------------------------------------

    def submit(self, key: str | None = None, **spec: Any) -> str:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"world_size": 2, "optimizer": {"lr": 0.05}, **spec}
        response = self.client.post("/runs", json=body, headers=headers)
        assert response.status_code in (200, 201), response.text
        run_id: str = response.json()["id"]
        return run_id

    def run(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.client.get(f"/runs/{run_id}").json()
        return run

    def attempt(self, run_id: str) -> dict[str, Any]:
        """The newest attempt."""
        attempt: dict[str, Any] = self.run(run_id)["attempts"][-1]
        return attempt

    def steps(self, run_id: str) -> list[int]:
        """The numbers of the stored steps, in their order."""
        return stored_steps(self.client, run_id)

    def wait(self, condition: Callable[[], Any], limit_s: float = LIMIT_S, what: str = "the condition") -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit_s, f"not within {limit_s} s: {what}\n{self.log()}"
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_for(self, run_id: str, *statuses: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        self.wait(lambda: self.run(run_id)["status"] in statuses, limit_s, f"{run_id} is {statuses}")
        return self.run(run_id)

    def train(self, steps: int = 1_000_000, **spec: Any) -> str:
        """Submit a run and wait until all of its ranks train."""
        run_id = self.submit(**{**STEADY, **spec, "steps": steps})
        self.wait_for_ranks(run_id, 1)
        return run_id

    def wait_for_ranks(self, run_id: str, number: int) -> list[int]:
        """Wait until attempt `number` records steps; returns its ranks' process ids."""

        def trains() -> bool:
            run = self.run(run_id)
            assert run["status"] not in ENDED, run
            attempt = run["attempts"][-1] if run["attempts"] else None
            if attempt is None or attempt["number"] < number or len(attempt["ranks"]) < run["spec"]["world_size"]:
                return False
            return "first_step" in attempt["phases"]

        self.wait(trains, LIMIT_S, f"attempt {number} of {run_id} trains")
        return [rank["pid"] for rank in self.attempt(run_id)["ranks"]]

    def stop(self, run_id: str) -> None:
        self.client.post(f"/runs/{run_id}/stop")
        self.wait_for(run_id, *ENDED)

    def stop_all(self) -> None:
        """Open the queue and end every run that has not ended."""
        self.client.post("/queue/resume")
        live = [run["id"] for run in self.client.get("/runs?limit=1000").json()["runs"] if run["status"] not in ENDED]
        for run_id in live:
            self.client.post(f"/runs/{run_id}/stop")
        for run_id in live:
            self.wait_for(run_id, *ENDED)


def stored_steps(client: httpx.Client, run_id: str) -> list[int]:
    """Return the numbers of a run's stored steps, in their order, over all pages."""
    found: list[int] = []
    start: int | None = 0
    while start is not None:
        page = client.get(f"/runs/{run_id}/steps", params={"start": start, "limit": 1000}).json()
        found += [step["step"] for step in page["steps"]]
        start = page["next_start"]
    return found


def processes_with(*words: str) -> list[psutil.Process]:
    """The processes whose command line contains every one of these words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if all(word in line for word in words):
            found.append(process)
    return found


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def enrolment_token(ray: FakeRay, attempt_id: str) -> str:
    """The one-use token on the command line of an attempt's job."""
    found = re.search(r"--enrolment-token[= ]'?([\w-]+)", ray.jobs[attempt_id]["entrypoint"])
    assert found is not None
    return found[1]


class Worker:
    """An attempt's job without training: the real enrolment, spool and shipper against the real service."""

    def __init__(self, installation: Installation, attempt_id: str) -> None:
        assert installation.ray is not None
        self.attempt_id, self.url = attempt_id, installation.url
        body = json.dumps({"token": enrolment_token(installation.ray, attempt_id)}).encode()
        with closing(ControllerClient(self.url, attempt_id)) as client:
            enrolled = json.loads(client.post("enrol", body))
        self.token, self.epoch = enrolled["token"], enrolled["epoch"]
        self.client = ControllerClient(self.url, attempt_id, self.token)
        self.directory = spool_directory(attempt_id)
        self.spool = SpoolWriter(self.directory, Destination(self.url, attempt_id, self.token, self.epoch))
        self.next_step = 0

    def record(self, count: int) -> None:
        """Append the next steps to the spool, as rank 0 does."""
        for step in range(self.next_step, self.next_step + count):
            self.spool.append(StepRecord(step, overflow=False, discarded=False, loss=1.0 / (step + 1)))
        self.next_step += count

    def ship(self) -> None:
        """Have a shipper carry the spool from now on."""
        start_detached(self.directory)

    def shippers(self) -> list[psutil.Process]:
        return processes_with("workers.shipper", str(self.directory))

    def beat(self) -> None:
        self.client.post("heartbeat", json.dumps({"status": "running", "steps_recorded": self.next_step}).encode())

    @contextmanager
    def beating(self, every_s: float = 0.5) -> Iterator[None]:
        """Give signs of life for the block, whether or not they are heard."""
        over = threading.Event()
        client = ControllerClient(self.url, self.attempt_id, self.token)

        def keep() -> None:
            with closing(client):
                while not over.wait(every_s):
                    with suppress(WorkersError):
                        client.post("heartbeat", b'{"status": "running"}')

        thread = threading.Thread(target=keep)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def finish(self) -> None:
        """Report that all went well."""
        self.beat()
        outcome = {"status": "succeeded", "declared_steps": self.next_step}
        self.client.post("outcome", json.dumps(outcome).encode())

    def close(self) -> None:
        self.spool.close()
        self.client.close()
        for shipper in self.shippers():
            with suppress(psutil.NoSuchProcess):
                shipper.kill()
        remove_spool(self.directory)


@contextmanager
def working(installation: Installation, run_id: str, number: int = 1) -> Iterator[Worker]:
    """Play the job of a run's attempt for the block."""
    attempt_id = f"run-{run_id}-a{number}"
    assert installation.ray is not None
    installation.wait(lambda: attempt_id in installation.ray.jobs, LIMIT_S, f"{attempt_id} is submitted")  # type: ignore[union-attr]
    worker = Worker(installation, attempt_id)
    try:
        yield worker
    finally:
        worker.close()
