"""Two ranks for the training tests, one cluster for the driver's: each started once."""

from collections.abc import Iterator

import pytest

from tests.distributed.gang import Gang
from tests.integration.workers.local_ray import LocalRay
from workers.warm_pool import ray_start_environment


@pytest.fixture(scope="session")
def ranks() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalRay]:
    ray = LocalRay(num_gpus=2, num_cpus=2, environment=ray_start_environment())
    yield ray
    ray.stop()


@pytest.fixture
def cluster_of_two_nodes() -> Iterator[LocalRay]:
    """The driver's node has no GPU: all ranks run on the other one."""
    ray = LocalRay(num_gpus=0, num_cpus=2)
    try:
        ray.add_node(num_gpus=2)
        yield ray
    finally:
        ray.stop()
