"""Services to break: quick ones on a cluster in memory, and one with a real Ray that all tests of training share."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.installation import Installation
from tests.integration.service.fake_ray import FakeRay, fake_ray

# Named, not imported: with torch, the tests that train nothing would wait for it.
TASKS = "tests.faults.tasks:hungry,tests.faults.tasks:stubborn"
QUICK = {"retry_backoff_s": 0.2, "stop_grace_s": 2}
# Short enough to be waited for, and longer than a busy machine keeps a living one silent.
SHORT_LEASE = {"heartbeat_s": 1, "lease_s": 15}
TRAINING = {**QUICK, "heartbeat_s": 2, "lease_s": 20, "stall_limit_s": 20, "allow_tasks": TASKS}

# Bad input and strangers at the door are refused in milliseconds: `make test` has these as well.
ALWAYS = ("test_security.py", "test_register.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what kills, fills disks or waits for locks: minutes, for `make faults`."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path.name not in ALWAYS:
            item.add_marker(pytest.mark.faults)


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray(gpus=2.0) as one:
        yield one


@pytest.fixture
def install(ray: FakeRay, tmp_path: Path) -> Iterator[Callable[..., Installation]]:
    """Make installations on the cluster in memory; each is ended with the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> Installation:
            settings = {**QUICK, **options.pop("settings", {})}
            one = Installation(tmp_path / "home", ray=ray, settings=settings, **options)
            stack.callback(one.close)
            return one

        yield make


@pytest.fixture
def service(install: Callable[..., Installation]) -> Installation:
    """A service that is ready, on a cluster in memory."""
    one = install()
    one.start()
    return one


@pytest.fixture(scope="session")
def libc_faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands before the C library and lies to a program."""
    built = tmp_path_factory.mktemp("libc") / "faults.so"
    source = Path(__file__).with_name("libc_faults.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-o", built, source, "-ldl"], check=True, timeout=300)
    return built


@pytest.fixture(scope="session")
def training_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    # Short: Ray's sockets lie below it.
    with Installation(tmp_path_factory.mktemp("f"), settings=TRAINING) as one:
        yield one


@pytest.fixture
def training(training_service: Installation) -> Iterator[Installation]:
    """A service and its Ray that really train, shared: no test leaves a run to the next one."""
    yield training_service
    training_service.stop_all()
