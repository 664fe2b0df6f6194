"""A service that drains before it ends: live runs end first, nothing new starts, a second signal ends it at once."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

# A service for each home that it reads, in a process forked from one that has imported it all; then its exit code.
PROGRAM = """
import os, sys
from pathlib import Path
from service.app import create_app
from service.serve import Server, bind
from service.settings import Settings
from tests.unit.controller.fakes import FakeLauncher

def serve(home):
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    settings = Settings(home=Path(home), port=port, tick_s=0.1, stop_grace_s=0.1)
    say = lambda address: print(os.getpid(), address, flush=True)
    server = Server(create_app(settings, FakeLauncher(1.0)), on_ready=say, drain=True)
    server.run(sockets=[listener])

for home in sys.stdin:
    child = os.fork()
    if child == 0:
        serve(home.strip())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def starter() -> Iterator["subprocess.Popen[bytes]"]:
    """What services are forked from."""
    # Unbuffered: what has been said can be waited for.
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


class Draining:
    """A service told to drain when it is told to end."""

    def __init__(self, starter: "subprocess.Popen[bytes]", home: Path) -> None:
        assert starter.stdin is not None
        assert starter.stdout is not None
        self._said = starter.stdout
        starter.stdin.write(f"{home}\n".encode())
        pid, self.address = self._said.readline().decode().split()
        self.pid = int(pid)
        self.exit_code: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its exit code, None while it lives."""
        if self.exit_code is None and select.select([self._said], [], [], 0)[0]:
            self.exit_code = int(self._said.readline())
        return self.exit_code

    def wait(self, limit_s: float) -> int | None:
        select.select([self._said], [], [], limit_s)
        return self.poll()


@pytest.fixture
def draining(starter: "subprocess.Popen[bytes]", tmp_path: Path) -> Iterator[tuple[Draining, httpx.Client]]:
    """A service of the test's own, and a client of it."""
    process = Draining(starter, tmp_path)
    with httpx.Client(base_url=process.address, timeout=30, trust_env=False, verify=False) as client:
        yield process, client
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait(60)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def live_run(client: httpx.Client) -> str:
    run: str = client.post("/runs", json={}).json()["id"]
    wait_for(lambda: client.get(f"/runs/{run}").json()["status"] == "pending")
    return run


def test_a_draining_service_lets_its_run_end_starts_no_other_and_then_ends_cleanly(
    draining: tuple[Draining, httpx.Client],
) -> None:
    process, client = draining
    run = live_run(client)
    process.send_signal(signal.SIGTERM)
    later = client.post("/runs", json={}).json()["id"]
    wait_for(lambda: client.get(f"/runs/{later}").json()["waiting_reason"] == "the service is draining before it ends")
    assert process.poll() is None
    assert client.get(f"/runs/{run}").json()["status"] == "pending"

    client.post(f"/runs/{run}/stop")

    assert process.wait(60) == 0


def test_a_second_signal_ends_a_draining_service_at_once_and_leaves_its_run_alone(
    draining: tuple[Draining, httpx.Client], tmp_path: Path
) -> None:
    process, client = draining
    live_run(client)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: client.get("/healthz").status_code == 200)

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 0


def test_a_draining_service_without_a_run_ends_at_once(
    draining: tuple[Draining, httpx.Client],
) -> None:
    process, _ = draining
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 0
