"""Gangs of ranks, one per world size, spawned on first use and shared by every module here."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.gang import Gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Callable[[int], Gang]]:
    """`gang(2)` is the gang of two ranks."""
    gangs: dict[int, Gang] = {}
    yield lambda world_size: gangs.setdefault(world_size, Gang(world_size))
    for each in gangs.values():
        each.close()
