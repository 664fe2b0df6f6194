"""Copies a database as it is at one moment, while a service writes to it.

SQLite's own online backup, checked before it gets its name; of PostgreSQL what `pg_dump` makes of it.
"""

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url

from service.errors import InvalidInput, Unavailable


def back_up(database_url: str, target: Path) -> int:
    """Write a copy of the database to `target` and return its size in bytes.

    Args:
        database_url: `sqlite:///path` or `postgresql://…`.
        target: a file that is not there yet.
    Raises:
        InvalidInput: the target is there already, or the database is not.
        Unavailable: the copy could not be made; nothing is left of it.
    """
    if target.exists():
        raise InvalidInput(f"{target} is there already", field="target", value=str(target), remedy="give another name")
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            url = make_url(database_url)
            if url.get_backend_name() == "sqlite":
                _copy_sqlite(Path(url.database or ""), beside)
            else:
                _dump_postgres(database_url, beside)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise Unavailable(f"{target} cannot be written: {error}", remedy="name a file where you may write") from error
    return target.stat().st_size


def _copy_sqlite(source: Path, target: Path) -> None:
    if not source.exists():
        raise InvalidInput(
            f"there is no database at {source}", field="database_url", value=str(source),
            remedy="give --database-url, or set MUONSCOPE_HOME",
        )  # fmt: skip
    try:
        with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
            # In one piece, of one snapshot, beside which the service writes on: between two pieces it would write too,
            # and each of its commits lets a copy in pieces begin anew.
            live.backup(copy, pages=-1)
            (answer,) = copy.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        raise Unavailable(f"the copy of {source} failed: {error}", remedy="see the disk's room, try again") from error
    if answer != "ok":
        raise Unavailable(f"the copy of {source} is damaged: {answer}", remedy="the database may be: check it")


def _dump_postgres(database_url: str, target: Path) -> None:
    command = shutil.which("pg_dump")
    if command is None:
        raise Unavailable("pg_dump is not on the PATH", remedy="install PostgreSQL's client programs")
    url = make_url(database_url).set(drivername="postgresql")
    # A password in the command line would be everybody's to read.
    secret = {"PGPASSWORD": url.password} if url.password else {}
    address = url.set(password=None).render_as_string(hide_password=False)
    done = subprocess.run(
        [command, "--format=custom", f"--file={target}", f"--dbname={address}", "--no-password"],
        env={**os.environ, **{name: str(value) for name, value in secret.items()}},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Unavailable(
            f"pg_dump failed: {done.stderr.strip()[-500:]}", remedy="its version must not be older than the server's"
        )
