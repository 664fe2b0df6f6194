"""A command that is told to end while a service is being asked to begin something."""

import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.unit.cli.conftest import RunCommand
from tests.unit.cli.test_experiment_verbs import experiment_json
from tests.unit.client.fake_service import FakeService, run_json


@pytest.fixture
def spec(tmp_path: Any) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text("name: first\nsteps: 30\n")
    return str(path)


def _interrupts_and_answers(answer: Any, number: int) -> Any:
    """An answer that comes after the command was told to end: the service has taken what it was asked."""

    def answered(_: httpx.Request) -> httpx.Response:
        signal.pthread_kill(threading.main_thread().ident, number)
        # Handled while the command still waits.
        time.sleep(0.3)
        return httpx.Response(201, json=answer)

    return answered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_being_queued_when_the_command_was_interrupted_is_stopped(
    command: RunCommand, service: FakeService, spec: str, number: int
) -> None:
    service.answers["POST", "/runs"] = _interrupts_and_answers(run_json(), number)
    service.answers["GET", "/runs/r1"] = run_json(status="stopped")
    service.answers["POST", "/runs/r1/stop"] = httpx.Response(202, json=run_json(status="running"))

    result = command("run", spec)

    assert result.code == 130
    assert "POST /runs/r1/stop" in service.paths()
    assert "once the service has answered" in result.err
    assert result.err.endswith("\nstopping r1\nr1 is stopped\n")


def test_a_submission_that_is_interrupted_names_what_it_queued(
    command: RunCommand, service: FakeService, spec: str
) -> None:
    service.answers["POST", "/runs"] = _interrupts_and_answers(run_json(), signal.SIGINT)

    result = command("submit", spec)

    assert (result.code, result.out) == (130, "r1\n")


def test_an_experiment_that_was_being_queued_when_the_command_was_interrupted_is_stopped(
    command: RunCommand, service: FakeService
) -> None:
    going = experiment_json(run_json("one"), run_json("two"))
    service.answers["POST", "/experiments"] = _interrupts_and_answers(going, signal.SIGINT)
    for name in ("one", "two"):
        service.answers["POST", f"/runs/{name}/stop"] = run_json(name, status="stopped")

    result = command("experiment", "run", "thirty-step")

    assert result.code == 130
    assert [path for path in service.paths() if path.endswith("/stop")] == [
        "POST /runs/one/stop",
        "POST /runs/two/stop",
    ]
    assert "stopped 2 of experiment e1's 2 runs" in result.err


def test_who_asks_twice_does_not_wait_for_the_service(command: RunCommand, service: FakeService, spec: str) -> None:
    answer_now = threading.Event()

    def never(_: httpx.Request) -> httpx.Response:
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.3)
        answer_now.wait(30)
        return httpx.Response(201, json=run_json())

    service.answers["POST", "/runs"] = never
    began = time.monotonic()
    result = command("run", spec)
    took = time.monotonic() - began
    answer_now.set()

    assert result.code == 130
    assert took < 25
