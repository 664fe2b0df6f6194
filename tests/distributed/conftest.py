"""Gangs of ranks, one per world size, spawned on first use and shared by every module here."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.gang import Gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Callable[[int], Gang]]:
    """`gang(2)` is the gang of two ranks: gloo on the CPU, or with DS_ACCELERATOR=cuda NCCL, one GPU a rank."""
    gangs: dict[int, Gang] = {}

    def of_size(world_size: int) -> Gang:
        if os.environ.get("DS_ACCELERATOR") == "cuda" and world_size > torch.cuda.device_count():
            pytest.skip(f"needs {world_size} GPUs")
        return gangs.setdefault(world_size, Gang(world_size))

    yield of_size
    for each in gangs.values():
        each.close()
