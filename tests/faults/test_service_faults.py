"""F1, F2, F7, F9, F10, F11, F12, F13 and F16: what the service itself survives. The cluster is in memory."""

import json
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import create_engine, text

from tests.faults.conftest import SHORT_LEASE
from tests.installation import Installation, working
from tests.integration.service.fake_ray import FakeRay
from tests.postgres import binaries, server
from tests.unit.service.test_bad_input import HOSTILE, JSON

Install = Callable[..., Installation]
DYING = "tests.faults.dying_up"
MEGABYTE = 1024 * 1024


def test_f1_a_controller_killed_between_commit_and_reply_has_the_run_once(install: Install, ray: FakeRay) -> None:
    one = install()
    one.start((DYING, "after-commit"))
    (one.home / "die").touch()
    with pytest.raises(httpx.TransportError):
        one.client.post("/runs", json={}, headers={"Idempotency-Key": "once"})
    assert one.process is not None
    assert one.process.wait(60) == -9
    with closing(sqlite3.connect(one.home / "muonscope.db")) as store:
        ((stored,),) = store.execute("SELECT uid FROM run").fetchall()

    one.start()
    again = one.client.post("/runs", json={}, headers={"Idempotency-Key": "once"})

    assert (again.status_code, again.json()["id"]) == (200, stored)
    one.wait(lambda: ray.jobs, what="its job")
    assert ray.submissions == {f"run-{stored}-a1": 1}


def test_f1_a_controller_killed_amid_submissions_has_every_run_it_acknowledged(install: Install, ray: FakeRay) -> None:
    one = install()
    one.start()
    acknowledged: dict[str, str] = {}

    def submit_for_ever(client: int) -> None:
        with suppress(httpx.TransportError), httpx.Client(base_url=one.url, timeout=60, trust_env=False) as own:
            for number in range(10_000):
                key = f"{client}-{number}"
                answer = own.post("/runs", json={}, headers={"Idempotency-Key": key})
                acknowledged[key] = answer.json()["id"]

    clients = [threading.Thread(target=submit_for_ever, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    one.wait(lambda: len(acknowledged) > 20, what="some are acknowledged")
    one.kill()
    for client in clients:
        client.join()
    one.start()

    stored = set()
    cursor: str | None = ""
    while cursor is not None:
        page = one.client.get("/runs", params={"limit": 1000, **({"cursor": cursor} if cursor else {})}).json()
        stored |= {run["id"] for run in page["runs"]}
        cursor = page["next_cursor"]
    assert set(acknowledged.values()) <= stored
    # One request of each client was under way: stored or not, but never twice.
    assert len(stored) <= len(acknowledged) + 4
    assert set(ray.submissions.values()) <= {1}


def power_cut(install: Install, libc_faults: Path, disk: Path, module: tuple[str, ...]) -> tuple[str, set[str]]:
    """Submit a run, take from the disk all that was not synced by the answer, and start again from what is left."""
    disk.mkdir()
    one = install(environment={"LD_PRELOAD": str(libc_faults), "FAULT_DISK": str(disk)})
    one.start(module)
    one.client.post("/queue/pause")
    accepted = one.submit(world_size=1)
    left = disk.with_name("left")
    shutil.copytree(disk, left)
    one.kill()
    for path in one.home.glob("muonscope.db*"):
        path.unlink()
    for path in left.glob("muonscope.db*"):
        shutil.copy(path, one.home / path.name)
    del one.environment["LD_PRELOAD"]
    one.start()
    return accepted, {run["id"] for run in one.client.get("/runs").json()["runs"]}


def test_f2_an_accepted_run_is_there_after_a_power_cut(install: Install, libc_faults: Path, tmp_path: Path) -> None:
    accepted, kept = power_cut(install, libc_faults, tmp_path / "disk", ("muonscope.cli.main",))

    assert kept == {accepted}


def test_f2_the_power_cut_takes_what_was_not_synced(install: Install, libc_faults: Path, tmp_path: Path) -> None:
    _, kept = power_cut(install, libc_faults, tmp_path / "disk", (DYING, "careless"))

    assert kept == set()


def test_f7_while_the_database_is_locked_nothing_is_accepted_and_no_row_is_lost(
    service: Installation, ray: FakeRay
) -> None:
    run_id = service.submit(world_size=1, steps=150)
    with working(service, run_id) as worker, worker.beating():
        worker.record(50)
        worker.ship()
        service.wait(lambda: len(service.steps(run_id)) == 50, what="the first rows")
        with closing(sqlite3.connect(service.home / "muonscope.db", isolation_level=None)) as locker:
            locker.execute("BEGIN EXCLUSIVE")
            worker.record(50)
            began = time.monotonic()
            refused = service.client.post("/runs", json={})
            # Ten seconds is what a request waits for its turn and for the lock together; for each, it would be twenty.
            assert time.monotonic() - began < 19
            assert (refused.status_code, bool(refused.headers["Retry-After"])) == (503, True)
            assert service.client.get("/healthz").status_code == 200
            assert len(service.client.get("/runs").json()["runs"]) == 1
            worker.record(50)
            locker.execute("ROLLBACK")
        service.wait(lambda: len(service.steps(run_id)) == 150, what="the rows of the meantime")
        worker.finish()
    assert service.steps(run_id) == list(range(150))
    run = service.run(run_id)
    assert (run["status"], [attempt["number"] for attempt in run["attempts"]]) == ("succeeded", [1])
    assert service.client.post("/runs", json={}).status_code == 201
    assert ray.submissions[f"run-{run_id}-a1"] == 1


class Postgres:
    """A PostgreSQL that can be taken away and brought back."""

    def __init__(self, url: str) -> None:
        self._data = Path(url.partition("host=")[2]) / "data"

    def _control(self, *arguments: str) -> None:
        programs = binaries()
        assert programs is not None
        owner = self._data.owner()
        command = [str(programs / "pg_ctl"), "-D", str(self._data), "-l", str(self._data.parent / "log"), "-w"]
        if psutil.Process().username() != owner:
            command = ["runuser", "-u", owner, "--", *command]
        subprocess.run([*command, *arguments], cwd="/", check=True, capture_output=True, timeout=120)

    def stop(self) -> None:
        self._options = (self._data / "postmaster.opts").read_text().split('"')
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        # As they were: each second word between quotes is an option.
        words = [word for word in self._options[1::2] if not word.startswith(("-D", str(self._data)))]
        self._control("-o", " ".join(f"'{word}'" if " " in word else word for word in words), "start")


def test_f7_while_postgresql_is_stopped_nothing_is_accepted_and_no_row_is_lost(install: Install) -> None:
    with server() as url:
        one = install(settings={"database_url": url})
        one.start()
        run_id = one.submit(world_size=1, steps=100)
        with working(one, run_id) as worker, worker.beating():
            worker.record(50)
            worker.ship()
            one.wait(lambda: len(one.steps(run_id)) == 50, what="the first rows")
            postgres = Postgres(url)
            postgres.stop()
            worker.record(50)
            refused = one.client.post("/runs", json={})
            assert (refused.status_code, bool(refused.headers["Retry-After"])) == (503, True)
            assert one.client.get("/healthz").status_code == 200
            postgres.start()
            one.wait(one.is_ready, what="the service is ready again")
            one.wait(lambda: len(one.steps(run_id)) == 100, what="the rows of the meantime")
            worker.finish()
        assert one.steps(run_id) == list(range(100))
        run = one.run(run_id)
        assert (run["status"], len(run["attempts"])) == ("succeeded", 1)
        one.close()
        engine = create_engine(url)
        with engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM run")).scalar_one() == 1
        engine.dispose()


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_f9_a_jump_of_the_clock_declares_nothing_dead_and_nothing_alive(
    install: Install, libc_faults: Path, tmp_path: Path, ray: FakeRay, jump_s: int
) -> None:
    clock = tmp_path / "clock"
    one = install(settings=SHORT_LEASE, environment={"LD_PRELOAD": str(libc_faults), "FAULT_CLOCK": str(clock)})
    one.start()
    run_id = one.submit(world_size=1)
    with working(one, run_id) as worker:
        worker.beat()
        clock.write_text(str(jump_s))
        # Silent for some looks of the controller, and for less than its lease.
        time.sleep(3)
        with worker.beating():
            time.sleep(4)
            alive = one.run(run_id)
        # Silent for good: the lease is fifteen seconds by a clock that does not jump.
        began = time.monotonic()
        one.wait(lambda: len(one.run(run_id)["attempts"]) == 2, what="the silent attempt is given up")
        assert 8 < time.monotonic() - began < 60

    assert (alive["status"], len(alive["attempts"])) == ("running", 1)
    first, second = one.run(run_id)["attempts"]
    assert (first["failure"]["kind"], second["number"]) == ("worker_stalled", 2)
    times = one.client.get(f"/runs/{run_id}/events").json()["events"]
    assert [event["id"] for event in times] == sorted(event["id"] for event in times)


def test_f10_a_repeated_submission_is_one_run_in_parallel_and_after_a_kill(service: Installation) -> None:
    def post(body: dict[str, Any]) -> httpx.Response:
        return service.client.post("/runs", json=body, headers={"Idempotency-Key": "key"})

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, [{"steps": 3}] * 20))
    service.kill()
    service.start()
    after, other = post({"steps": 3}), post({"steps": 4})

    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert {answer.json()["id"] for answer in (*answers, after)} == {after.json()["id"]}
    assert (after.status_code, other.status_code, other.json()["field"]) == (200, 409, "Idempotency-Key")
    assert len(service.client.get("/runs").json()["runs"]) == 1


MANY = 100


def test_f11_of_many_runs_only_those_that_fit_become_jobs_and_all_cancelled_at_once_end(
    service: Installation, ray: FakeRay
) -> None:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    before = process.memory_info().rss
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda _: service.submit(world_size=1, optimizer={}), range(MANY)))
    service.wait(lambda: len(ray.jobs) == 2, what="two jobs for two GPUs")
    waiting = service.client.get("/queue").json()["waiting"]

    def cancel(run_id: str) -> int:
        return service.client.post(f"/runs/{run_id}/stop").status_code

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(cancel, ids))
    line = [run["id"] for run in reversed(service.client.get(f"/runs?limit={MANY}").json()["runs"])]

    def statuses() -> set[str]:
        return {run["status"] for run in service.client.get(f"/runs?limit={MANY}").json()["runs"]}

    service.wait(lambda: statuses() == {"stopped"}, what="all are stopped")
    assert (waiting, set(answers)) == (MANY - 2, {202})
    # Where one was cancelled the next in line started, if it was not cancelled itself by then.
    with closing(sqlite3.connect(service.home / "muonscope.db")) as store:
        query = "SELECT run.uid FROM attempt JOIN run ON run.id = attempt.run_id ORDER BY attempt.id"
        started = [uid for (uid,) in store.execute(query)]
    assert started[:2] == line[:2]
    assert started == [run_id for run_id in line if run_id in set(started)]
    assert set(ray.submissions.values()) == {1}
    assert process.memory_info().rss - before < 100 * MEGABYTE


def test_f12_hostile_requests_are_refused_in_bounded_memory_and_others_are_served(service: Installation) -> None:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    service.client.post("/runs", content=HOSTILE["a hundred thousand arrays deep"][0], headers=JSON)
    before = process.memory_info().rss
    host, port = "127.0.0.1", service.port
    with ExitStack() as stack:
        for _ in range(50):
            slow = stack.enter_context(socket.create_connection((host, port), timeout=60))
            slow.sendall(f"POST /runs HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode())
            slow.sendall(b"Content-Length: 100\r\n\r\n{")
        answers = {
            name: service.client.post("/runs", content=body, headers=JSON).status_code
            for name, (body, _) in HOSTILE.items()
        }
        huge = service.client.post("/runs", content=(b"x" * MEGABYTE for _ in range(100)), headers=JSON)
        accepted = service.client.post("/runs", json={})

    assert answers == {name: status for name, (_, status) in HOSTILE.items()}
    assert (huge.status_code, accepted.status_code) == (413, 201)
    assert process.memory_info().rss - before < 100 * MEGABYTE
    assert len(service.client.get("/runs").json()["runs"]) == 1


def event_ids(response: httpx.Response) -> Iterator[tuple[int, dict[str, Any]]]:
    place = 0
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            place = int(value)
        elif name == "data":
            yield place, json.loads(value)


def test_f13_stuck_viewers_cost_bounded_memory_and_a_reconnected_one_misses_nothing(service: Installation) -> None:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    before = process.memory_info().rss
    with ExitStack() as stack:
        for _ in range(200):
            stuck = stack.enter_context(socket.socket())
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            stuck.settimeout(60)
            stuck.connect(("127.0.0.1", service.port))
            stuck.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n")
        with service.client.stream("GET", "/events") as seen:
            service.submit(world_size=1)
            last, _ = next(event_ids(seen))
        made = {service.submit(world_size=1, notes="x" * 5_000) for _ in range(30)}
        began = time.monotonic()
        assert service.client.get("/healthz").status_code == 200
        answered_in = time.monotonic() - began
        told: set[str] = set()
        with service.client.stream("GET", "/events", headers={"Last-Event-ID": str(last)}) as resumed:
            for place, run in event_ids(resumed):
                assert place > last
                told.add(run["id"])
                if made <= told:
                    break
        grown = process.memory_info().rss - before

    # Whoever waited for those that read nothing would wait for ever.
    assert answered_in < 20
    assert grown < 200 * MEGABYTE


def test_f16_a_service_killed_amid_a_migration_leaves_a_store_that_the_next_one_migrates(install: Install) -> None:
    one = install()
    assert one.spawn((DYING, "mid-migration")).wait(180) == -9
    with closing(sqlite3.connect(one.home / "muonscope.db")) as store:
        tables = store.execute("SELECT name FROM sqlite_master").fetchall()

    one.start()

    assert tables == []
    assert one.client.post("/runs", json={}).status_code == 201


def test_f16_a_store_of_a_newer_version_is_refused_with_the_remedy_and_left_alone(service: Installation) -> None:
    service.kill()
    path = service.home / "muonscope.db"
    with closing(sqlite3.connect(path)) as store:
        store.execute("UPDATE alembic_version SET version_num = '9999'")
        store.commit()

    assert service.spawn().wait(180) == 1

    assert "9999" in service.log()
    assert "start the newer Muonscope" in service.log()
    with closing(sqlite3.connect(path)) as store:
        assert store.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]
