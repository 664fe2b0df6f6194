from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from service.store.session import Database
from tests.databases import database, postgres_template, postgres_url, sqlite_database, sqlite_template
from tests.integration.api_telemetry.application import FakeController, application, served, wait_for_the_rest

__all__ = ["database", "postgres_template", "postgres_url", "sqlite_database", "sqlite_template"]


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[FastAPI, httpx.Client]]:
    """One server for all tests, by real HTTP; each test puts its own store behind it."""
    app = application(max_telemetry_bytes=1024 * 1024)
    with served(app) as client:
        yield app, client


@pytest.fixture
def client(
    server: tuple[FastAPI, httpx.Client], sqlite_database: Database, controller: FakeController
) -> Iterator[httpx.Client]:
    """The API over a SQLite store."""
    yield _behind(server, sqlite_database, controller)
    wait_for_the_rest(server[0])


@pytest.fixture
def any_client(
    server: tuple[FastAPI, httpx.Client], database: Database, controller: FakeController
) -> Iterator[httpx.Client]:
    """The API over the store of the test's `database`."""
    yield _behind(server, database, controller)
    wait_for_the_rest(server[0])


def _behind(server: tuple[FastAPI, httpx.Client], store: Database, controller: FakeController) -> httpx.Client:
    app, client = server
    app.state.database, app.state.controller = store, controller
    return client
