"""What holds for every test: no state of the machine's own service is read or written."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Shared machines are slow at times: a deadline per example would test the machine.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _own_muonscope_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MUONSCOPE_") and not name.startswith("MUONSCOPE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path / "muonscope-home"))


# Tests of these share what is slow to start (ranks, a Ray, a browser): one process runs all of them. Of the rest, each
# file is a scope of its own. The longest come first, so that none is begun when the others have ended.
SHARED = (
    "tests/distributed",
    "tests/integration/workers",
    "tests/web",
    "tests/integration/service",
    "tests/faults",
    "tests/integration/releases",
    "tests/integration/client",
)


def _scope_of(path: str) -> str:
    return next((folder for folder in SHARED if path.startswith(folder + "/")), path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {folder: place for place, folder in enumerate(SHARED)}
    items.sort(key=lambda item: rank.get(_scope_of(item.path.relative_to(config.rootpath).as_posix()), len(rank)))


class ByScope(LoadScopeScheduling):
    """xdist's `--dist loadscope`, with our scopes."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope:
    return ByScope(config, log)
