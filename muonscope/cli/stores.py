"""The service's database for verbs that work on it themselves, whether a service runs or not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.store.session import Database


@contextmanager
def open_store(database_url: str | None) -> Iterator["Database"]:
    """Open the database that is named, else the one of MUONSCOPE_HOME; its schema is for the block to look at."""
    from service.settings import Settings
    from service.store.session import Database

    settings = Settings() if database_url is None else Settings(database_url=database_url)
    with store_errors():
        database = Database(settings.effective_database_url)
        try:
            yield database
        finally:
            database.dispose()


def missing_store(database_url: str | None) -> str | None:
    """Say that there is no store yet and where; None where there is one, or a server keeps it."""
    from service.settings import Settings

    settings = Settings() if database_url is None else Settings(database_url=database_url)
    with open_store(database_url) as database:
        # Nothing has connected to it, which is what makes an SQLite file.
        file = database.path
    if file is None or file.exists():
        return None
    if settings.database_url and not file.parent.exists():
        # A name with a mistake in it, which opening it says.
        return None
    return f"there is no store in {file if settings.database_url else settings.home} yet"


def warn_of_another_home(database_url: str | None) -> None:
    """Say on standard error that the service which this shell's commands talk to keeps another state than they look at.

    Nothing where it keeps the same, is not to be seen, or a database is named.
    """
    from muonscope.cli.homes import home_served_at
    from muonscope.client import ClientSettings
    from service.settings import Settings

    url, settings = ClientSettings().url, Settings()
    served = home_served_at(url) if not (database_url or settings.database_url) else None
    if served is None or served.resolve() == settings.home.resolve():
        return
    print(
        f"note: the service at {url} keeps its state in {served}, not in {settings.home}; "
        f"for its own: export MUONSCOPE_HOME={served}",
        file=sys.stderr,
    )


@contextmanager
def store_errors() -> Iterator[None]:
    """Have what the store finds wrong be the command's own error: what happened, and the remedy."""
    from muonscope.errors import MuonscopeError
    from service.errors import ServiceError
    from service.store.migrate import SchemaTooNew

    try:
        yield
    except SchemaTooNew as error:
        raise MuonscopeError(str(error)) from error
    except ServiceError as error:
        raise MuonscopeError(error.detail, remedy=error.remedy) from error
