"""Two ranks for the training tests, one cluster for the driver's: each started once."""

from collections.abc import Iterator

import pytest

from tests.distributed.gang import Gang
from tests.integration.workers.local_ray import LocalRay


@pytest.fixture(scope="session")
def ranks() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalRay]:
    ray = LocalRay(num_gpus=2, num_cpus=2)
    yield ray
    ray.stop()
