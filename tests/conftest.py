"""What holds for every test: no state of the machine's own service is read or written."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Shared machines are slow at times: a deadline per example would test the machine.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _own_muonscope_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MUONSCOPE_") and not name.startswith("MUONSCOPE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path / "muonscope-home"))


# Tests of these share what is slow to start (ranks, a Ray, a browser), so that one process runs all of them; of
# the rest, each file is one. The longest come first, so that none is begun when the others have ended.
SHARED = (
    "tests/distributed",
    "tests/integration/workers",
    "tests/integration/releases",
    "tests/web",
    "tests/integration/service",
    "tests/faults",
    "tests/integration/client",
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def group_of(item: pytest.Item) -> str:
        path = item.path.relative_to(config.rootpath).as_posix()
        return next((folder for folder in SHARED if path.startswith(folder + "/")), path)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    rank = {folder: place for place, folder in enumerate(SHARED)}
    items.sort(key=lambda item: rank.get(group_of(item), len(rank)))
