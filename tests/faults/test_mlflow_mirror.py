"""The mirror on the MLflow that `.venv-trackers` has: on a store of its own, and over its REST server."""

import json
import math
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.status import AttemptStatus, RunStatus
from service.controller.local_ray import free_ports
from service.controller.transitions import LEGAL
from service.store.runs import RunRepository
from service.store.session import Database
from tests.databases import sqlite_database, sqlite_template
from tests.records import end_attempt, insert, started, step_record

__all__ = ["sqlite_database", "sqlite_template"]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("MUONSCOPE_TEST_TRACKERS", REPOSITORY / ".venv-trackers" / "bin" / "python"))
STEPS = 400
ODD = {3: math.nan, 4: math.inf, 5: -math.inf, 6: None}
# MLflow's SQL stores put the largest number in the place of an infinity.
LARGEST = repr(1.7976931348623157e308)
AS_MLFLOW_TAKES_THEM = {3: "nan", 4: LARGEST, 5: f"-{LARGEST}"}

if not PYTHON.exists():
    pytest.skip("there is no .venv-trackers; make bench-trackers makes it", allow_module_level=True)


def _run(database: Database) -> str:
    uid, attempt_id = started(database, name="mirrored run")
    insert(database, attempt_id, [step_record(step, loss=ODD.get(step, step / 8)) for step in range(STEPS)])
    end_attempt(database, attempt_id, AttemptStatus.SUCCEEDED)
    with database.write() as session:
        runs = RunRepository(session)
        run = runs.get(uid)
        for status in (RunStatus.RUNNING, RunStatus.SUCCEEDED):
            runs.set_status(run, status, legal=LEGAL, who="test", why="test")
    return uid


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLFLOW_DISABLE_TELEMETRY": "true"}


def _mirroring(verb: str, database: Database, uri: str, *rest: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(PYTHON), "-m", "tests.faults.mlflow_mirroring", verb, f"sqlite:///{database.path}", uri, *rest],
        env=_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture(params=["store", "server"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where MLflow is: its own SQLite file, or its server in front of one."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    if request.param == "store":
        yield store
        return
    port = free_ports(1)[0]
    command = [str(PYTHON), "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=_environment(), cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        # Its workers are of its session.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def test_a_mirror_that_is_killed_goes_on_and_mlflow_has_every_value_once(sqlite_database: Database, uri: str) -> None:
    uid = _run(sqlite_database)

    killed = _mirroring("carry", sqlite_database, uri, "3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = _mirroring("carry", sqlite_database, uri)
    assert finished.returncode == 0, finished.stderr

    answer = _mirroring("read", sqlite_database, uri)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    assert (found["name"], found["status"]) == ("mirrored run", "FINISHED")
    assert found["tags"]["muonscope.run_id"] == uid
    assert found["tags"]["muonscope.status"] == "succeeded"
    assert found["params"]["step_ordering"] == "ordered"
    losses = sorted(map(tuple, found["metrics"]["loss"]))
    assert losses == [(step, AS_MLFLOW_TAKES_THEM.get(step, repr(step / 8))) for step in range(STEPS) if step != 6]
    for key in ("grad_norm", "overflow", "ns_calls", "step_time_s"):
        assert [step for step, _ in sorted(map(tuple, found["metrics"][key]))] == list(range(STEPS)), key
