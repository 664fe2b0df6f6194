"""What a long queue costs: to submit into, to look at, and to decide over, on a simulated cluster of 1,000 GPUs.

The cluster stands behind the launcher protocol; the service, its HTTP and its store are real. `make bench` prints the
numbers; `MUONSCOPE_BENCH_RUNS` makes the queue shorter for a trial.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

from muonscope.contract.status import RunStatus
from service.controller.launcher import JobStatus
from service.controller.loop import ControllerLoop
from service.store import migrate
from service.store.models import Attempt
from service.store.queue import QueueRepository
from service.store.runs import RunRepository
from service.store.session import Database
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving

pytestmark = pytest.mark.benchmark

RUNS = int(os.environ.get("MUONSCOPE_BENCH_RUNS", "10000"))
GPUS = 1000
CLIENTS = 4
# The last tenth is submitted by one client, an answer at a time, behind all others.
ONE_BY_ONE = RUNS // 10
POST_P95_S = 0.050
TICK_S = 0.100


def _say(text: str) -> None:
    print(f"\n    {text}", flush=True)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _described(taken: list[float]) -> str:
    return (
        f"median {statistics.median(taken) * 1e3:.1f} ms, p95 {_percentile(taken, 0.95) * 1e3:.1f} ms, "
        f"slowest {max(taken) * 1e3:.0f} ms"
    )


@contextmanager
def _timed_ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Collect how long each tick takes, from its first look to its last act."""
    taken: list[float] = []
    real = ControllerLoop.tick

    async def timed(self: ControllerLoop) -> None:
        began = time.perf_counter()
        await real(self)
        taken.append(time.perf_counter() - began)

    monkeypatch.setattr(ControllerLoop, "tick", timed)
    yield taken


_CLIENT = """
import json, sys, threading, time
import httpx
url, first, runs, clients = sys.argv[1], *map(int, sys.argv[2:])
taken, lock, numbers = [], threading.Lock(), iter(range(first, first + runs))
def submit():
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            # Every tenth takes eight GPUs, in three priorities.
            body = {"world_size": 8 if number % 10 == 0 else 1, "priority": number % 3, "name": f"run {number}"}
            began = time.perf_counter()
            answer = client.post("/runs", json=body)
            taken.append(time.perf_counter() - began)
            assert answer.status_code == 201, answer.text
threads = [threading.Thread(target=submit) for _ in range(clients)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(taken))
"""


def _submit(url: str, first: int, runs: int, clients: int) -> list[float]:
    """Submit runs from a process of its own, as users do, and return how long each answer took."""
    command = [sys.executable, "-c", _CLIENT, url, str(first), str(runs), str(clients)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken: list[float] = json.loads(printed)
    return taken


@pytest.mark.timeout(900)
def test_ten_thousand_queued_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path / 'muonscope.db'}")
    migrate.upgrade(database)
    launcher, process = FakeLauncher(GPUS), psutil.Process()
    with _timed_ticks(monkeypatch) as ticks, serving(tmp_path, launcher) as client:
        client.post("/queue/pause")
        before = process.memory_info().rss
        began = time.perf_counter()
        crowd = _submit(str(client.base_url), 0, RUNS - ONE_BY_ONE, CLIENTS)
        spent = time.perf_counter() - began
        assert len(crowd) == RUNS - ONE_BY_ONE
        _say(f"{len(crowd)} POST /runs from {CLIENTS} clients, as fast as they are answered, "
             f"{len(crowd) / spent:.0f} a second: {_described(crowd)}")  # fmt: skip
        posts = _submit(str(client.base_url), RUNS - ONE_BY_ONE, ONE_BY_ONE, 1)
        _say(f"{len(posts)} more from one client: {_described(posts)}")
        _say(f"memory grew by {(process.memory_info().rss - before) / 1e6:.0f} MB")

        pages = []
        for _ in range(20):
            began = time.perf_counter()
            assert len(client.get("/runs?limit=50").json()["runs"]) == min(50, RUNS)
            pages.append(time.perf_counter() - began)
        _say(f"a page of 50 runs: median {statistics.median(pages) * 1e3:.0f} ms")

        line = _line(database)
        ticks.clear()
        client.post("/queue/resume")
        _wait_until_full(client, launcher)
        filling = list(ticks)
        _say(f"{len(filling)} ticks that fill the cluster: {_described(filling)}")
        started = _started(database)
        assert len(started) == len(launcher.requests)
        assert started == [uid for uid in line if uid in set(started)], "not in the order of the line"
        ticks.clear()
        time.sleep(5)
        _say(f"{len(ticks)} ticks over a full cluster: {_described(ticks)}")
    database.dispose()
    assert _percentile(posts, 0.95) <= POST_P95_S
    assert _percentile(filling, 0.95) <= TICK_S
    assert statistics.median(ticks) <= TICK_S


def test_an_eight_gpu_run_is_not_starved_by_a_stream_of_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is full of one-GPU runs, and two more arrive for each that ends; an eight-GPU run joins the line."""
    database = Database(f"sqlite:///{tmp_path / 'muonscope.db'}")
    migrate.upgrade(database)
    launcher = FakeLauncher(64)
    with _timed_ticks(monkeypatch) as ticks, serving(tmp_path, launcher, tick_s=0.05) as client:
        for _ in range(80):
            client.post("/runs", json={"world_size": 1})
        _wait_until_full(client, launcher)
        big = client.post("/runs", json={"world_size": 8}).json()["id"]
        ended = 0
        while client.get(f"/runs/{big}").json()["status"] == RunStatus.QUEUED:
            for _ in range(2):
                client.post("/runs", json={"world_size": 1})
            alive = [name for name, job in launcher.rows.items() if job.status is JobStatus.RUNNING]
            # Stopped by its user: what only lost its job would be tried again, in its old place.
            client.post(f"/runs/{alive[0].split('-')[1]}/stop")
            launcher.end(alive[0], JobStatus.STOPPED)
            ended += 1
            # Those queued before it, and the eight that it waits for.
            assert ended <= 16 + 8 + 8
            # One that may have begun before it ended, and one that has seen it.
            until = len(ticks) + 2
            while len(ticks) < until:
                time.sleep(0.01)
        _say(f"the eight-GPU run started after {ended} small ones had ended, 16 of them queued before it")
    database.dispose()


def _line(database: Database) -> list[str]:
    with database.read() as session:
        ids = [entry.run_id for entry in QueueRepository(session).line()]
        uids = {run_id: run.uid for start in range(0, len(ids), 500)
                for run_id, run in RunRepository(session).by_ids(ids[start : start + 500]).items()}  # fmt: skip
    return [uids[run_id] for run_id in ids]


def _started(database: Database) -> list[str]:
    """The runs that were given GPUs, in that order."""
    with database.read() as session:
        names = session.scalars(select(Attempt.submission_id).order_by(Attempt.id))
        return [name.split("-")[1] for name in names]


def _wait_until_full(client: Any, launcher: FakeLauncher) -> None:
    """Wait until nothing has been started for a second."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        if len(launcher.requests) != count:
            count, since = len(launcher.requests), time.monotonic()
        assert client.get("/healthz").status_code == 200
        time.sleep(0.05)
