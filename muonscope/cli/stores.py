"""The service's database for verbs that work on it themselves, whether a service runs or not."""

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
