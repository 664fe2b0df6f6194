"""Server-sent events: complete, resumable, bounded, and no reason for the service not to end."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.events import _one_run
from service.api.feed import Change, ChangeFeed
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving
from tests.unit.service.test_bad_input import assert_problem
from tests.unit.service.test_runs import wait_for_status

Frame = tuple[str, str, dict[str, Any]]


def frames(response: httpx.Response) -> Iterator[Frame]:
    """Yield (event, id, data) as a browser would."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if not line and "data" in fields:
            yield fields["event"], fields["id"], json.loads(fields["data"])
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def take(stream: Iterator[Frame], until: Callable[[Frame], bool], limit_s: float = 60.0) -> list[Frame]:
    deadline, taken = time.monotonic() + limit_s, []
    for frame in stream:
        taken.append(frame)
        if until(frame):
            return taken
        assert time.monotonic() < deadline, taken
    raise AssertionError(f"the stream ended: {taken}")


def open_stream(client: httpx.Client, path: str, last_id: str | None = None) -> Any:
    headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
    return client.stream("GET", path, headers=headers)


def test_every_change_of_any_run_is_streamed(client: httpx.Client) -> None:
    client.post("/runs", json={"name": "before"})
    with open_stream(client, "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        run_id = client.post("/runs", json={"name": "after"}).json()["id"]
        seen = take(frames(response), lambda frame: frame[2]["id"] == run_id and frame[2]["status"] == "pending")
    assert {event for event, _, _ in seen} == {"run"}
    ids = [int(place) for _, place, _ in seen]
    assert ids == sorted(ids)


def test_a_stream_resumes_after_the_last_event_seen(client: httpx.Client) -> None:
    with open_stream(client, "/events") as response:
        client.post("/runs", json={})
        last_id = take(frames(response), lambda frame: frame[2]["status"] == "pending")[-1][1]
    missed = client.post("/runs", json={}).json()["id"]
    wait_for_status(client, missed, "pending")
    with open_stream(client, "/events", last_id) as response:
        seen = take(frames(response), lambda frame: frame[2]["id"] == missed and frame[2]["status"] == "pending")
    assert all(int(place) > int(last_id) for _, place, _ in seen)


def test_one_runs_stream_begins_with_its_state_and_tells_every_event(client: httpx.Client) -> None:
    run_id = client.post("/runs", json={"world_size": 2}).json()["id"]
    wait_for_status(client, run_id, "pending")
    client.post("/runs", json={"name": "another"})
    with open_stream(client, f"/runs/{run_id}/events") as response:
        stream = frames(response)
        event, _, state = next(stream)
        assert (event, state["status"]) == ("run", "pending")
        client.post(f"/runs/{run_id}/stop")
        seen = take(stream, lambda frame: frame[0] == "event" and frame[2]["kind"] == "stop_requested")
    assert {frame[2]["id"] for frame in seen if frame[0] == "run"} <= {run_id}
    kinds = [(frame[2]["kind"], frame[2]["to_status"]) for frame in seen if frame[0] == "event"]
    assert kinds == [
        ("run_status", "queued"), ("attempt_status", "pending"), ("run_status", "pending"), ("stop_requested", None),
    ]  # fmt: skip


def test_one_runs_stream_resumes_without_telling_twice(client: httpx.Client) -> None:
    run_id = client.post("/runs", json={}).json()["id"]
    wait_for_status(client, run_id, "pending")
    with open_stream(client, f"/runs/{run_id}/events") as response:
        stream = frames(response)
        seen = take(stream, lambda frame: frame[0] == "event" and frame[2]["to_status"] == "pending")
        seen += take(stream, lambda frame: frame[0] == "event" and frame[2]["kind"] == "run_status")
    client.post(f"/runs/{run_id}/stop")
    with open_stream(client, f"/runs/{run_id}/events", seen[-1][1]) as response:
        later = take(frames(response), lambda frame: frame[0] == "event")
    assert later[-1][2]["kind"] == "stop_requested"


@pytest.mark.parametrize("others", [0, 2])
def test_a_view_goes_on_after_the_run_that_changed_last_was_deleted(client: httpx.Client, others: int) -> None:
    client.post("/queue/pause", json={})
    kept = [client.post("/runs", json={}).json()["id"] for _ in range(others)]
    last = client.post("/runs", json={}).json()["id"]
    for number in range(10):
        client.patch(f"/runs/{last}", json={"add_tags": [f"tag {number}"]})
    client.post(f"/runs/{last}/stop")
    with open_stream(client, "/events", "0") as response:
        seen = frames(response)
        take(seen, lambda frame: frame[2]["id"] == last and frame[2]["status"] == "stopped")

        assert client.delete(f"/runs/{last}").status_code == 204
        changed = kept[0] if kept else client.post("/runs", json={}).json()["id"]
        client.patch(f"/runs/{changed}", json={"add_tags": ["later"]})

        take(seen, lambda frame: frame[2]["id"] == changed and frame[2]["tags"] == ["later"])


def test_a_view_that_was_of_another_store_is_shown_what_this_one_has(client: httpx.Client) -> None:
    run_id = client.post("/runs", json={}).json()["id"]
    for path, place in (("/events", "1000"), (f"/runs/{run_id}/events", "1000.1000")):
        with open_stream(client, path, place) as response:
            take(frames(response), lambda frame: frame[0] == "run" and frame[2]["id"] == run_id)


def test_the_view_of_a_run_that_is_deleted_ends(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.events._KEEPALIVE_S", 0.05)
    run_id = client.post("/runs", json={}).json()["id"]
    client.post(f"/runs/{run_id}/stop")
    wait_for_status(client, run_id, "stopped")
    with open_stream(client, f"/runs/{run_id}/events") as response:
        seen = frames(response)
        next(seen)
        assert client.delete(f"/runs/{run_id}").status_code == 204

        # Not broken off: the server says that this was all.
        assert {event for event, _, _ in seen} == {"event"}


def test_the_view_of_a_quiet_run_asks_the_store_no_more_than_others_change() -> None:
    asked: list[int] = []

    class Feed(ChangeFeed):
        """Its window begins after the run's last change, as in a service where much has happened since."""

        def read_run(self, run_id: str) -> Change:
            asked.append(self._newest)
            return Change(1, run_id, b"{}")

    async def follow() -> None:
        feed = Feed(None)  # type: ignore[arg-type]
        feed._floor, feed._newest = 100, 100
        stream = _one_run(feed, None, Change(1, "quiet", b"{}"), (1, 0))  # type: ignore[arg-type]
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        while not asked:
            await asyncio.sleep(0.001)
        for revision in range(101, 150):
            feed._window.append(Change(revision, "busy", b"{}"))
            feed._newest = revision
            feed._wake_all()
            await asyncio.sleep(0.002)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(follow())
    assert len(asked) == 1


def test_streams_are_limited(make_client: Callable[..., httpx.Client]) -> None:
    client = make_client(max_streams=1)
    with open_stream(client, "/events") as held:
        raw = held.iter_raw()
        next(raw)
        assert_problem(client.get("/events"), 503)


def test_a_reader_that_stops_reading_harms_nobody(client: httpx.Client) -> None:
    with open_stream(client, "/events") as stuck:
        raw = stuck.iter_raw()
        next(raw)
        for index in range(20):
            assert client.post("/runs", json={"notes": "x" * 10_000, "name": f"run {index}"}).status_code == 201
        # Within the client's own limit.
        assert client.get("/healthz").status_code == 200


def test_an_open_stream_does_not_keep_the_service_from_ending(tmp_path: Path, launcher: FakeLauncher) -> None:
    with httpx.Client(timeout=60) as watching, ExitStack() as service:
        base = service.enter_context(serving(tmp_path, launcher)).base_url
        with watching.stream("GET", base.join("/events")) as held:
            raw = held.iter_raw()
            next(raw)
            # Ending takes at most the limit that `serving` has for it, and the stream ends as a whole one does.
            service.close()
            assert b"event:" not in b"".join(raw)
