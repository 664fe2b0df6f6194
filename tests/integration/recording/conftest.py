"""Ranks that train, and a service whose cluster is in memory: each started once."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.distributed.gang import Gang
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving


@pytest.fixture(scope="session")
def gang() -> Iterator[Callable[[int], Gang]]:
    """`gang(2)` is the gang of two ranks."""
    gangs: dict[int, Gang] = {}
    yield lambda world_size: gangs.setdefault(world_size, Gang(world_size))
    for each in gangs.values():
        each.close()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("home"), FakeLauncher(gpus=4.0)) as client:
        yield client
