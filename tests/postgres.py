"""A real PostgreSQL for a test session: made in a temporary folder, reached by a Unix socket, stopped at the end."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError

_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def binaries() -> Path | None:
    """Return the folder of PostgreSQL's programs, None where it is not installed."""
    on_path = shutil.which("initdb")
    return (
        Path(on_path).parent if on_path else next((folder for folder in _FOLDERS if (folder / "initdb").exists()), None)
    )


@contextmanager
def server() -> Iterator[str]:
    """Start a PostgreSQL and give the URL of its maintenance database."""
    programs = binaries()
    assert programs is not None, "PostgreSQL is not installed"
    # A short path of its own: a socket's path may have 107 bytes, and its owner is another user where we are root.
    folder = Path(tempfile.mkdtemp(prefix="muonscope-pg-", dir="/tmp"))
    prefix: list[str] = []
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root.
        owner = next(name for name in ("postgres", "nobody") if _exists(name))
        shutil.chown(folder, owner)
        prefix = ["runuser", "-u", owner, "--"]
    data = folder / "data"

    def call(program: str, *arguments: str) -> None:
        command = [*prefix, str(programs / program), *arguments]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    try:
        call("initdb", "-D", str(data), "-U", "muonscope", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off -c max_connections=64"
        call("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-o", options, "-w", "start")
        try:
            yield f"postgresql+psycopg://muonscope@/postgres?host={folder}"
        finally:
            call("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fresh_database(server_url: str, template: str = "template1") -> Iterator[str]:
    """Create a database on the server, a copy of the template, give its URL and drop it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    engine = create_engine(server_url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            _copy_database(connection, template, name)
        yield server_url.replace("/postgres?", f"/{name}?")
        with engine.connect() as connection:
            connection.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
    finally:
        engine.dispose()


def _copy_database(connection: Connection, template: str, name: str) -> None:
    """Copy a database, once the backends of those that have left it have ended, which PostgreSQL awaits for 5 s."""
    deadline = time.monotonic() + 60
    while True:
        try:
            connection.execute(text(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
            return
        except OperationalError as error:
            if "being accessed by other users" not in str(error) or time.monotonic() > deadline:
                raise


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
