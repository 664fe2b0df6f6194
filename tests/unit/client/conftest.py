"""One fake service a test, and no waiting between tries."""

import asyncio
import threading
import time

import pytest

from muonscope.client import Client
from tests.unit.client.fake_service import FakeService


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def client(service: FakeService) -> Client:
    return Client("http://service", transport=service.transport)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the test's own thread asked for, none of them taken; others go on sleeping."""
    asked: list[float] = []
    really_sleep, really_pause = time.sleep, asyncio.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            asked.append(seconds)
        else:
            really_sleep(seconds)

    async def pause(seconds: float) -> None:
        # A server of another module's tests may live on in a thread: its loop would spin without its pauses.
        if threading.current_thread() is threading.main_thread():
            asked.append(seconds)
        else:
            await really_pause(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(asyncio, "sleep", pause)
    return asked
