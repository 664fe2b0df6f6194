"""What holds for every test: no state of the machine's own service is read or written."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.examples import PROFILE

settings.load_profile(PROFILE)
# What is imported and collected stays: looked at again and again, it would cost each process seconds.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_muonscope_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MUONSCOPE_") and not name.startswith("MUONSCOPE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path / "muonscope-home"))


# Tests of these share what is slow to start (ranks, a Ray, a browser): one process runs all of them. Of the rest, each
# file is a scope of its own.
SHARED = (
    "tests/distributed",
    "tests/integration/workers",
    "tests/web",
    "tests/integration/service",
    "tests/faults",
    "tests/integration/releases",
    "tests/integration/client",
    "tests/integration/recording",
)


# The longest come first, so that none is begun when the others have ended.
FIRST = (
    *SHARED,
    "tests/unit/workers/test_fork_server.py",
    "tests/unit/service/test_access.py",
    "tests/integration/store/test_steps.py",
    "tests/unit/workers/test_releases.py",
    "tests/unit/controller/test_queue_state_machine.py",
    "tests/test_docs.py",
    "tests/unit/workers/test_environment.py",
)


def _scope_of(path: str) -> str:
    return next((folder for folder in SHARED if path.startswith(folder + "/")), path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {scope: place for place, scope in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(_scope_of(item.path.relative_to(config.rootpath).as_posix()), len(rank)))


class ByScope(LoadScopeScheduling):
    """xdist's `--dist loadscope`, with our scopes."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope:
    return ByScope(config, log)
