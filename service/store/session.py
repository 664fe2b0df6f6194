"""Sessions: one transaction each, the only way to the database.

    with database.read() as session:               a consistent snapshot, never committed
    with database.write() as session:              one transaction, committed at the end, rolled back on error
    with database.write(durable=False) as session: survives a killed process, on SQLite not a power cut

A database that cannot answer raises `service.errors.Unavailable`.

The controller is the only writer. A lock orders its threads, so that no SQLite writer waits by polling and event ids
become visible in their order on both databases. A writer waits for that lock and for SQLite's together no longer than
one limit: behind a locked database all that wait are refused at about the same time, not one after another.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from service.errors import Unavailable
from service.store.types import LOWER_OF_SQLITE

__all__ = ["Database", "Session"]

_WRITE = "muonscope_write"
_DEADLINE = "muonscope_deadline"
_BUSY_TIMEOUT_S = 10.0
_FOLD_TURN_MS = 20
_FOLD_PAUSE_S = 0.1
_REMEDY = "try again; nothing of this request was stored"
# PostgreSQL's code: a standby that does not lead yet, or any more.
_READ_ONLY = "25006"
_DAMAGED = "put a copy that `muonscope db backup` made in its place, or name another database"


class Database:
    """The SQL store, SQLite or PostgreSQL by its URL."""

    def __init__(self, url: str, *, pool_size: int = 16) -> None:
        """Open nothing yet; connections are made when first used.

        Args:
            url: `sqlite:///path` or `postgresql://…`.
            pool_size: connections kept; twice as many more are opened under load.
        """
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise ValueError(f"{parsed.drivername} is not supported; give a sqlite:/// or postgresql:// URL")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite and parsed.database in (None, "", ":memory:"):
            raise ValueError("a SQLite store needs a file; give sqlite:///path")
        self.path = Path(parsed.database) if self.is_sqlite and parsed.database else None
        self.engine: Engine = create_engine(
            parsed,
            pool_size=pool_size,
            max_overflow=2 * pool_size,
            pool_pre_ping=not self.is_sqlite,
            connect_args={"timeout": _BUSY_TIMEOUT_S} if self.is_sqlite else {"connect_timeout": 10},
        )
        if self.is_sqlite:
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        self._writer = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Give a session on one consistent snapshot; what it changes is thrown away."""
        with self._translated(), Session(self.engine, expire_on_commit=False, autoflush=False) as session:
            if not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Session]:
        """Give a session in one transaction, committed when the block ends without an error.

        Args:
            durable: whether the commit must survive a power cut. PostgreSQL's always do.
        Raises:
            Unavailable: other writers held the database for as long as one may wait.
        """
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        with self._turn(), self._translated(), Session(self.engine, expire_on_commit=False) as session:
            session.connection(execution_options={_WRITE: "FULL" if durable else "NORMAL", _DEADLINE: deadline})
            yield session
            session.commit()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Tell "not now" (locked, unreachable, full) from a mistake of ours."""
        try:
            yield
        # The driver's own where it was spoken to directly.
        except (OperationalError, PoolTimeout, self.engine.dialect.loaded_dbapi.OperationalError) as error:
            reason = error.orig if isinstance(error, OperationalError) else error
            # PostgreSQL's goes over several lines.
            said = " ".join(str(reason).split())
            raise Unavailable(f"the database cannot answer now: {said}", remedy=_REMEDY) from error
        except DatabaseError as error:
            if getattr(error.orig, "sqlstate", None) == _READ_ONLY:
                raise Unavailable(f"the database takes no writes now: {error.orig}", remedy=_REMEDY) from error
            # SQLite's own class is what it raises for a file that is damaged, or was never a database; its subclasses
            # are other mistakes.
            if type(error.orig) is not sqlite3.DatabaseError:
                raise
            raise Unavailable(f"{self.path} cannot be read: {error.orig}", remedy=_DAMAGED) from error

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the place of this process's only writer."""
        if not self._writer.acquire(timeout=_BUSY_TIMEOUT_S):
            raise Unavailable(
                f"the database cannot answer now: other writers have held it for {_BUSY_TIMEOUT_S:g} s", remedy=_REMEDY
            )
        try:
            yield
        finally:
            self._writer.release()

    def ping(self) -> None:
        """Raise Unavailable when the database cannot answer."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def fold_log(self, *, wait_s: float) -> bool:
        """Fold SQLite's write-ahead log into its file, which shrinks by the pages that were given back.

        Readers of an older state, and a fold that is under way, are waited for, but not at the expense of writers:
        SQLite keeps them out while it waits, so it waits briefly and often.

        Args:
            wait_s: how long to wait in all, in seconds.
        Returns:
            whether all of it was folded.
        """
        deadline = time.monotonic() + wait_s
        with self._translated(), self.engine.connect() as connection:
            driver = connection.connection.dbapi_connection
            assert driver is not None
            driver.execute(f"PRAGMA busy_timeout = {_FOLD_TURN_MS}")
            try:
                # Outside of a transaction. The first of its three numbers says whether something was in its way.
                while driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(_FOLD_PAUSE_S)
                return True
            finally:
                driver.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")

    def vacuum(self, tables: Sequence[str]) -> None:
        """Give the space of PostgreSQL's deleted rows back, as far as the tables' ends are empty."""
        with (
            self._translated(),
            self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            connection.exec_driver_sql(f"VACUUM (TRUNCATE) {', '.join(tables)}")

    def dispose(self) -> None:
        """Close every pooled connection; on SQLite this folds the write-ahead log into the file."""
        self.engine.dispose()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver must not begin transactions of its own: _begin_sqlite says which kind.
    connection.isolation_level = None
    connection.create_function(LOWER_OF_SQLITE, 1, str.lower, deterministic=True)
    cursor = connection.cursor()
    if not cursor.execute("PRAGMA page_count").fetchone()[0]:
        # Before the first page is written, else it takes a VACUUM; on a store in use it would wait for the writer.
        cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA cache_size = -16384")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    synchronous = connection.get_execution_options().get(_WRITE)
    if synchronous is None:
        connection.exec_driver_sql("BEGIN")
        return
    # SQLite refuses this inside a transaction; each writing one says it anew, for connections are pooled.
    connection.exec_driver_sql(f"PRAGMA synchronous = {synchronous}")
    left_s = max(0.0, connection.get_execution_options()[_DEADLINE] - time.monotonic())
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(left_s * 1000)}")
    try:
        # Take the write lock now: a transaction that read first could not wait for it.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
