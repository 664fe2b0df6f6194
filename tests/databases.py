"""Fixtures: a migrated store of its own for each test, on SQLite and on a real PostgreSQL.

A folder's conftest imports those it needs.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import make_url

from service.store.migrate import upgrade
from service.store.session import Database
from tests.postgres import fresh_database, server

BACKENDS = ("sqlite", "postgresql")


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url, pool_size=4)
    try:
        yield database
    finally:
        # A server's thread may be about to give one back after its last byte: a pool disposed of would not close it.
        deadline = time.monotonic() + 30
        while database.engine.pool.checkedout() and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.005)
        database.dispose()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The maintenance database of a PostgreSQL that ends with the session."""
    with server() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> Iterator[str]:
    """The name of a migrated database to copy: quicker than migrating for each test."""
    with fresh_database(postgres_url) as url:
        with opened(url) as database:
            upgrade(database)
        yield str(make_url(url).database)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("template") / "muonscope.db"
    with opened(f"sqlite:///{path}") as store:
        upgrade(store)
    return path


@pytest.fixture(params=BACKENDS)
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A migrated, empty store; the test runs once on each backend."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_database")
        return
    template = request.getfixturevalue("postgres_template")
    with fresh_database(request.getfixturevalue("postgres_url"), template) as url, opened(url) as store:
        yield store


@pytest.fixture(params=BACKENDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a store without any schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'muonscope.db'}"
        return
    with fresh_database(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.fixture
def sqlite_database(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """A migrated, empty SQLite store, for what is SQLite's alone or does not depend on the backend."""
    path = shutil.copy(sqlite_template, tmp_path / "muonscope.db")
    with opened(f"sqlite:///{path}") as store:
        yield store
