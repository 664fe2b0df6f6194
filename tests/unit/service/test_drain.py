"""A service that drains before it ends: live runs end first, nothing new starts, a second signal ends it at once."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

PROGRAM = """
import sys
from pathlib import Path
from service.app import create_app
from service.serve import Server, bind
from service.settings import Settings
from tests.unit.controller.fakes import FakeLauncher
listener = bind("127.0.0.1", 0)
port = listener.getsockname()[1]
settings = Settings(home=Path(sys.argv[1]), port=port, tick_s=0.1, stop_grace_s=0.1)
say = lambda address: print(address, flush=True)
server = Server(create_app(settings, FakeLauncher(1.0)), on_ready=say, drain=True)
server.run(sockets=[listener])
"""


@pytest.fixture
def draining(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A service told to drain when it is told to end, and a client of it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        with httpx.Client(
            base_url=process.stdout.readline().strip(), timeout=30, trust_env=False, verify=False
        ) as client:
            yield process, client
        process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def live_run(client: httpx.Client) -> str:
    run: str = client.post("/runs", json={}).json()["id"]
    wait_for(lambda: client.get(f"/runs/{run}").json()["status"] == "pending")
    return run


def test_a_draining_service_lets_its_run_end_starts_no_other_and_then_ends_cleanly(
    draining: tuple[subprocess.Popen[str], httpx.Client],
) -> None:
    process, client = draining
    run = live_run(client)
    process.send_signal(signal.SIGTERM)
    later = client.post("/runs", json={}).json()["id"]
    wait_for(lambda: client.get(f"/runs/{later}").json()["waiting_reason"] == "the service is draining before it ends")
    assert process.poll() is None
    assert client.get(f"/runs/{run}").json()["status"] == "pending"

    client.post(f"/runs/{run}/stop")

    assert process.wait(20) == 0


def test_a_second_signal_ends_a_draining_service_at_once_and_leaves_its_run_alone(
    draining: tuple[subprocess.Popen[str], httpx.Client], tmp_path: Path
) -> None:
    process, client = draining
    live_run(client)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: client.get("/healthz").status_code == 200)

    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 0


def test_a_draining_service_without_a_run_ends_at_once(
    draining: tuple[subprocess.Popen[str], httpx.Client],
) -> None:
    process, _ = draining
    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 0
