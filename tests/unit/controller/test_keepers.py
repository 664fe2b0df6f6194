"""What goes on in the background outlives an error that nobody foresaw: nothing would start it again."""

import asyncio
import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from sqlalchemy.exc import InternalError

from service.controller.housekeeping import Housekeeper
from service.controller.leadership import Leadership
from service.controller.local_ray import Head, LocalRay
from service.errors import Unavailable
from service.settings import Settings
from service.store.leadership import LeadershipRepository
from tests.unit.controller.conftest import Desk


def failing_once(then: Callable[..., object], error: Exception) -> Callable[..., object]:
    """Raise at the first call, and do what is asked at all others."""
    errors = [error]

    def call(*args: object, **kwargs: object) -> object:
        if errors:
            raise errors.pop()
        return then(*args, **kwargs)

    return call


def read_only() -> InternalError:
    """What SQLAlchemy makes of a PostgreSQL that takes no writes for a moment, as in a failover."""
    return InternalError("UPDATE", {}, Exception("cannot execute UPDATE in a read-only transaction"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_claim_that_the_database_refuses_is_made_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.controller.leadership._TRY_S", 0.01)
    monkeypatch.setattr(LeadershipRepository, "claim", failing_once(LeadershipRepository.claim, read_only()))
    leadership, gained = Leadership(desk.database, "http://127.0.0.1:1"), list[str]()

    async def run() -> None:
        leadership.start(on_gain=lambda: gained.append("leads"))
        await until(lambda: bool(gained))
        await leadership.stop()

    asyncio.run(run())
    assert gained == ["leads"]


def test_a_claim_on_its_way_does_not_take_back_the_lead_that_is_given_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    leadership, given_up = Leadership(desk.database, "http://127.0.0.1:1"), threading.Event()
    claim, release = leadership.claim, leadership._release

    def claim_late() -> bool:
        given_up.wait(60)
        return claim()

    def give_up() -> None:
        release()
        given_up.set()

    monkeypatch.setattr(leadership, "claim", claim_late)
    monkeypatch.setattr(leadership, "_release", give_up)

    async def run() -> None:
        claim()
        leadership.start(on_gain=lambda: None)
        await asyncio.sleep(0)
        await leadership.stop()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(run())
    with desk.database.read() as session:
        assert LeadershipRepository(session).urls(first="") == [""]
        assert LeadershipRepository(session).leader_url() is None


def test_housekeeping_begins_with_the_lead_and_goes_on_after_an_error(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("service.controller.housekeeping._LOOK_S", 0.01)
    monkeypatch.setattr("service.controller.housekeeping._PERIOD_S", 0.02)
    leadership = Leadership(desk.database, "http://127.0.0.1:1")
    keeper = Housekeeper(desk.database, Settings(home=tmp_path, retention_days=1.0), leadership)
    tidied: list[bool] = []
    monkeypatch.setattr(keeper, "tidy", failing_once(lambda: tidied.append(leadership.is_leading), read_only()))

    async def run() -> None:
        keeper.start()
        await asyncio.sleep(0)
        await asyncio.to_thread(leadership.claim)
        await until(lambda: bool(tidied))
        await keeper.stop()

    asyncio.run(run())
    assert tidied[0]


def test_housekeeping_that_has_much_to_delete_ends_with_the_service(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leadership = Leadership(desk.database, "http://127.0.0.1:1")
    keeper = Housekeeper(desk.database, Settings(home=tmp_path, retention_days=1.0), leadership)
    deleted: list[str] = []
    leadership.claim()

    async def run() -> None:
        began, goes_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def delete(uid: str, **_: object) -> None:
            deleted.append(uid)
            loop.call_soon_threadsafe(began.set)
            goes_on.wait(60)

        # Two pages of them.
        pages = [[str(place) for place in range(50)], [str(place) for place in range(50, 100)], []]
        monkeypatch.setattr(keeper._retention, "expired", lambda _: pages.pop(0))
        monkeypatch.setattr(keeper._retention, "delete", delete)
        monkeypatch.setattr(keeper._retention, "reclaim", lambda: None)
        keeper.start()
        await began.wait()
        await keeper.stop()
        goes_on.set()
        # As the process does at its end; what is still to be deleted is deleted by the next one.
        await loop.shutdown_default_executor()

    limited = asyncio.wait_for(run(), 60)
    asyncio.run(limited)
    assert deleted == ["0"]


def test_a_head_is_adopted_once_the_store_says_whether_attempts_are_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.controller.local_ray._RESTART_PAUSE_S", 0.01)
    ended: list[str] = []
    monkeypatch.setattr("service.controller.local_ray.end_head", ended.append)
    alive = [float(os.getpid()), psutil.Process().create_time()]
    head = Head("x", "http://127.0.0.1:1", 4096, dict.fromkeys(("gcs", "raylet", "dashboard"), alive))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "head.json").write_text(json.dumps(dataclasses.asdict(head)))
    local, ready = LocalRay(Settings(home=tmp_path)), list[str]()

    async def answers(_: Head) -> bool:
        return True

    monkeypatch.setattr(local, "_answers", answers)

    async def run() -> None:
        keep_running = failing_once(lambda: True, Unavailable("the database cannot answer now"))
        local.start(on_ready=lambda: ready.append("ready"), keep_running=keep_running)  # type: ignore[arg-type]
        await until(lambda: bool(ready))
        await local.stop(keep_running=True)

    asyncio.run(run())
    assert (ready, ended, local.address) == (["ready"], [], "http://127.0.0.1:1")
