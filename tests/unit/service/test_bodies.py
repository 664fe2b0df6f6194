"""Bodies that are huge or slow: refused, without memory, and without harm to others."""

import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import httpx
import psutil
import pytest

from tests.integration.api_telemetry.workers import Workers
from tests.records import step_record
from tests.unit.service.test_bad_input import assert_problem

MEGABYTE = 1024 * 1024


def body_of(size: int) -> Iterator[bytes]:
    chunk = b"x" * MEGABYTE
    for _ in range(size // MEGABYTE):
        yield chunk


def test_a_hundred_megabytes_are_refused_without_being_kept(shared: httpx.Client) -> None:
    before = psutil.Process().memory_info().rss
    announced = shared.post(
        "/runs", content=body_of(100 * MEGABYTE),
        headers={"Content-Type": "application/json", "Content-Length": str(100 * MEGABYTE)},
    )  # fmt: skip
    assert_problem(announced, 413, field="body")
    streamed = shared.post("/runs", content=body_of(100 * MEGABYTE), headers={"Content-Type": "application/json"})
    assert_problem(streamed, 413, field="body")
    assert psutil.Process().memory_info().rss - before < 60 * MEGABYTE
    assert shared.get("/runs").json()["runs"] == []


def test_telemetry_may_be_larger_than_json(shared: httpx.Client) -> None:
    # Unauthorized, so it was read and not refused for its size.
    response = shared.post("/attempts/run-abc-a1/steps", content=b"x" * 2 * MEGABYTE)
    assert response.status_code in (401, 404)


def test_a_body_that_trickles_is_cut_off_and_others_are_served(make_client: Callable[..., httpx.Client]) -> None:
    client = make_client(body_timeout_s=2.0)
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port or 0), timeout=30) as slow:
        slow.sendall(
            f"POST /runs HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        assert client.post("/runs", json={}).status_code == 201
        answer = b""
        # Within the socket's own limit: never, were the rest of the body waited for.
        while part := slow.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["remedy"]


def test_a_client_that_leaves_amid_its_body_leaves_nothing(shared: httpx.Client) -> None:
    host, port = shared.base_url.host, shared.base_url.port
    with socket.create_connection((host, port or 0), timeout=10) as leaving:
        leaving.sendall(
            f"POST /runs HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
    assert shared.get("/healthz").status_code == 200
    assert shared.get("/runs").json()["runs"] == []


def test_d03_eight_writers_lose_no_row_to_readers_and_a_lock_from_outside(
    make_client: Callable[..., httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(tick_s=30.0)
    script = {"spec": {"name": "mine", "task": {"name": "external"}, "steps": 200}}
    begun = [client.post("/recordings", json=script).json() for _ in range(8)]
    voices = [Workers(client, one["run_id"], one["attempt_id"], one["token"], one["epoch"]) for one in begun]
    refused, written = Event(), Event()
    answers: list[int] = []
    read: list[int] = []

    def write(voice: Workers) -> None:
        for first in range(0, 200, 50):
            rows = [step_record(step) for step in range(first, first + 50)]
            while (status := voice.steps(rows).status_code) == 503:
                answers.append(status)
                refused.set()
                # As the shipper, which sends again until it is taken.
                written.wait(0.1)
            answers.append(status)

    def poll(voice: Workers) -> None:
        while not written.wait(0.05):
            read.append(client.get(f"/runs/{voice.run_id}").status_code)
            read.append(client.get("/runs").status_code)

    with (
        closing(sqlite3.connect(tmp_path / "muonscope.db", timeout=30, isolation_level=None)) as locker,
        ThreadPoolExecutor(12) as pool,
    ):
        locker.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr("service.store.session._BUSY_TIMEOUT_S", 0.3)
        writers = [pool.submit(write, voice) for voice in voices]
        readers = [pool.submit(poll, voice) for voice in voices[:4]]
        assert refused.wait(60)
        locker.execute("ROLLBACK")
        try:
            for writer in writers:
                writer.result(60)
        finally:
            written.set()
        for reader in readers:
            reader.result(60)

    assert {status for status in answers if status >= 500} == {503}
    assert set(read) == {200}
    stored = [client.get(f"/runs/{voice.run_id}").json()["summary"]["steps"] for voice in voices]
    assert stored == [200] * 8


def test_a_locked_database_is_503_and_nothing_is_accepted(
    make_client: Callable[..., httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(tick_s=30.0)
    with closing(sqlite3.connect(tmp_path / "muonscope.db", timeout=30, isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        with monkeypatch.context() as patch:
            patch.setattr("service.store.session._BUSY_TIMEOUT_S", 0.3)
            response = client.post("/runs", json={})
        assert_problem(response, 503)
        assert response.headers["retry-after"]
        locker.execute("ROLLBACK")
    assert client.post("/runs", json={}).status_code == 201
    assert len(client.get("/runs").json()["runs"]) == 1
