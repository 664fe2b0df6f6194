"""The service on a real socket and a migrated SQLite store, with a cluster in memory."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.store import migrate
from service.store.session import Database
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving, short_rests


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "migrated.db"
    database = Database(f"sqlite:///{path}")
    migrate.upgrade(database)
    database.dispose()
    return path


@pytest.fixture(autouse=True)
def _short_rests() -> Iterator[None]:
    with short_rests():
        yield


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher(gpus=2.0)


@pytest.fixture
def make_client(tmp_path: Path, migrated_file: Path, launcher: FakeLauncher) -> Iterator[Callable[..., httpx.Client]]:
    with ExitStack() as stack:

        def make(**overrides: Any) -> httpx.Client:
            shutil.copyfile(migrated_file, tmp_path / "muonscope.db")
            return stack.enter_context(serving(tmp_path, launcher, **overrides))

        yield make


@pytest.fixture
def client(make_client: Callable[..., httpx.Client]) -> httpx.Client:
    return make_client()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[httpx.Client]:
    """One service for those of a module's tests that do not mind what the others have left in it."""
    home = tmp_path_factory.mktemp("shared")
    shutil.copyfile(migrated_file, home / "muonscope.db")
    with serving(home, FakeLauncher(gpus=2.0)) as client:
        yield client
