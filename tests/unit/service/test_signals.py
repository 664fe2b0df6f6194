"""What a signal does to a service that runs."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.app import _stop_ray, create_app
from service.errors import Unavailable
from service.serve import Server
from service.settings import Settings
from tests.unit.controller.fakes import FakeLauncher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_is_a_clean_end_and_a_second_interrupt_a_hard_one(tmp_path: Path, number: signal.Signals) -> None:
    server = Server(create_app(Settings(home=tmp_path), FakeLauncher()))

    server.handle_exit(number, None)
    assert (server.should_exit, server.force_exit) == (True, False)

    server.handle_exit(number, None)
    assert server.force_exit == (number is signal.SIGINT)


def _away_once(then: bool) -> Any:
    """Whether attempts are live, asked of a store that does not answer the first time."""
    errors = [Unavailable("the database cannot answer now")]

    def ask() -> bool:
        if errors:
            raise errors.pop()
        return then

    return ask


def test_a_drain_ends_although_the_store_was_away_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.serve._DRAIN_LOOK_S", 0.0)
    app = create_app(Settings(home=tmp_path), FakeLauncher())
    app.state.controller = SimpleNamespace(has_live_attempts=_away_once(False))
    server = Server(app)

    asyncio.run(server._end_when_drained())

    assert server.should_exit


def test_a_service_that_cannot_leave_its_address_says_all_the_same_that_it_is_ready(tmp_path: Path) -> None:
    (tmp_path / "no folder").write_text("")
    app = create_app(Settings(home=tmp_path / "no folder" / "home", port=8899), FakeLauncher())
    app.state.controller = SimpleNamespace(problems=[])
    told: list[str] = []

    asyncio.run(Server(app, on_ready=told.append)._announce())

    assert told == ["http://127.0.0.1:8899"]


def test_a_store_that_cannot_say_what_is_live_at_the_end_leaves_ray_running() -> None:
    stopped: list[bool] = []

    async def stop(*, keep_running: bool) -> None:
        stopped.append(keep_running)

    controller: Any = SimpleNamespace(has_wanted_attempts=_away_once(False))
    asyncio.run(_stop_ray(SimpleNamespace(stop=stop), controller, SimpleNamespace(another_leads=False)))  # type: ignore[arg-type]

    assert stopped == [True]
