"""One fake service a test, and no waiting between tries."""

import asyncio
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
    """The pauses that were asked for, none of them taken."""
    asked: list[float] = []

    async def pause(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(time, "sleep", asked.append)
    monkeypatch.setattr(asyncio, "sleep", pause)
    return asked
