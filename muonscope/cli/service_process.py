"""A service for one command: used where one answers already, else started as a child and ended afterwards."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from muonscope.cli.screen import Screen
from muonscope.client import Client, ClientSettings
from muonscope.client.settings import DEFAULT_PORT
from muonscope.errors import MuonscopeError, ServiceFailed, ServiceStartFailed, ServiceUnreachable, UnexpectedAnswer

if TYPE_CHECKING:
    from service.settings import Settings

UP: Final = (sys.executable, "-m", "muonscope.cli.main", "up")
START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 30.0
_TELL_S: Final = 10.0
_POLL_S: Final = 0.1
_SHOWN_LOG_LINES: Final = 15
# What the environment says of a service elsewhere is nothing to one that lives for a command alone.
_OF_ANOTHER_SERVICE: Final = tuple(
    f"MUONSCOPE_{name}"
    for name in (
        "HOST", "ADVERTISE_URL", "REQUIRE_TOKEN", "RAY_ADDRESS", "RAY_TOKEN_FILE", "CLUSTER_MAX_GPUS", "WORKERS_HOME",
        "DATABASE_PASSWORD_FILE", "MLFLOW_TRACKING_URI",
    )
)  # fmt: skip
_STANDS_BY: Final = re.compile(r"standing by: (\S+) leads")


@dataclass(frozen=True, slots=True)
class Service:
    """The service a command works with."""

    client: Client
    home: Path | None
    """The folder of its state where it was started for the command; None where it was there already."""


class _StandsBy(Exception):
    """Another service leads on the same database: the started one would take no runs."""

    def __init__(self, leader_url: str) -> None:
        super().__init__(leader_url)
        self.leader_url = leader_url


@contextmanager
def service_for(url: str | None, screen: Screen) -> Iterator[Service]:
    """Yield the service at `url`, or where no address was given the home's own, started for the block if need be.

    Two services on one database never both take runs: one that leads there on another port is used as it is.
    An address that someone gave is taken at its word: when nothing answers there, that is an error.
    """
    settings = ClientSettings()
    given = url is not None or "url" in settings.model_fields_set
    with Client(url or settings.url, retries=0) as client:
        try:
            client.health()
        except (ServiceUnreachable, UnexpectedAnswer):
            # Nothing is there, or another program: neither matters where any address will do.
            if given:
                raise
        else:
            with Client(client.url) as patient:
                yield Service(patient, None)
            return
    home = settings.home.expanduser()
    leader_url = _recorded_leader(home)
    if leader_url is None:
        try:
            with _free_port() as port, _started(home, port, settings.url, screen) as started:
                yield Service(started, home)
                return
        except _StandsBy as found:
            leader_url = found.leader_url
    screen.progress(f"a service leads on {home} already: using {leader_url}, dashboard {leader_url}/ui/")
    with Client(leader_url) as leading:
        yield Service(leading, None)


@contextmanager
def _started(home: Path, port: int, nobody_at: str, screen: Screen) -> Iterator[Client]:
    """Yield a client of the home's own service, started for the block; says what it waits for."""
    screen.progress(f"no service answers at {nobody_at}: starting one on port {port} until the command ends")
    screen.progress(f"its state is in {home}")
    screen.progress("waiting for its Ray to start")
    began = time.monotonic()
    with _child_service(home, port, screen) as started:
        screen.progress(f"ready after {time.monotonic() - began:.0f} s")
        screen.progress(f"dashboard while it runs: {started.url}/ui/")
        yield started


@contextmanager
def standalone_service(record: Path, screen: Screen, *, task: str | None = None) -> Iterator[Client]:
    """Yield a service of the block's own, whose database is the record file; all else of it is gone afterwards.

    Args:
        record: the file.
        screen: hears what is waited for.
        task: a `module:function` of the user's: who types the command may run it, and its module is found where the
            command is typed.
    """
    from service.settings import sqlite_url

    # A short path: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="muonscope-") as folder, _free_port() as port:
        home = Path(folder)
        screen.progress(f"training without a service, on this machine, into {record}")
        screen.progress("waiting for Ray to start")
        record.parent.mkdir(parents=True, exist_ok=True)
        is_empty = not record.exists()
        settings = {"MUONSCOPE_DATABASE_URL": sqlite_url(record), **_own_code(task)}
        try:
            with _child_service(home, port, screen, settings, without=_OF_ANOTHER_SERVICE, token="") as started:
                is_empty = False
                yield started
        except _StandsBy as found:
            raise ServiceStartFailed(
                f"{record} is written to already, by the service at {found.leader_url}",
                remedy="wait until that has ended, or give another file: --record FILE",
            ) from None
        finally:
            # A service that was killed, or ended before its run did, leaves its Ray to the next one: here is none.
            from service.controller.local_ray import end_left_head

            end_left_head(home)
            # A file without a run would only puzzle whoever finds it.
            for end in ("", "-wal", "-shm") if is_empty else ():
                record.with_name(f"{record.name}{end}").unlink(missing_ok=True)


def _own_code(task: str | None) -> dict[str, str]:
    if task is None:
        return {}
    lists = {"MUONSCOPE_ALLOW_TASKS": (",", task), "PYTHONPATH": (os.pathsep, str(Path.cwd()))}
    return {name: separator.join(filter(None, [os.environ.get(name), own])) for name, (separator, own) in lists.items()}


def _recorded_leader(home: Path) -> str | None:
    """Return the address of the service that leads on the home's database, if it answers there."""
    from pydantic import ValidationError

    from service.settings import Settings

    try:
        settings = Settings(home=home)
    except ValidationError:
        # The service that is to be started says it better.
        return None
    return find_answering_leader(settings)


def find_answering_leader(settings: "Settings") -> str | None:
    """Return the address of the service that leads on the settings' database, if it answers there."""
    if not settings.database_url and not (settings.home / "muonscope.db").exists():
        return None
    # SQLAlchemy takes half a second to import: not where there is no record yet.
    from service.store.leadership import find_leader

    leader_url = find_leader(settings.effective_database_url)
    return leader_url if leader_url is not None and answers(leader_url) else None


def answers(url: str) -> bool:
    """Whether a Muonscope answers there."""
    try:
        with Client(url, retries=0) as client:
            client.health()
    except MuonscopeError:
        return False
    return True


@contextmanager
def _child_service(
    home: Path,
    port: int,
    screen: Screen,
    settings: Mapping[str, str] | None = None,
    *,
    without: Collection[str] = (),
    token: str | None = None,
) -> Iterator[Client]:
    home.mkdir(parents=True, exist_ok=True)
    log = home / "up.log"
    command = [*UP, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **{name: value for name, value in os.environ.items() if name not in without},
                "MUONSCOPE_HOME": str(home),
                **(settings or {}),
            },
            # Ctrl-C is for the command: it ends its runs first and the service after them.
            start_new_session=True,
        )
    try:
        with Client(f"http://127.0.0.1:{port}", token=token, retries=0) as client:
            try:
                _wait_until_ready(client, process, log, screen)
            except KeyboardInterrupt:
                print("\nending the service before it was ready: nothing was queued", file=sys.stderr)
                raise
        with Client(client.url, token=token) as client:
            yield client
    finally:
        _end(process)


def _wait_until_ready(client: Client, process: "subprocess.Popen[bytes]", log: Path, screen: Screen) -> None:
    began = told_at = time.monotonic()
    reason = "it has not answered yet"
    while (now := time.monotonic()) < began + START_LIMIT_S:
        if now - told_at > _TELL_S:
            told_at = now
            screen.progress(f"still waiting after {now - began:.0f} s: {reason}")
        if process.poll() is not None:
            raise ServiceStartFailed(
                f"the service ended with exit code {process.returncode} before it was ready:\n{_tail(log)}",
                remedy=f"the whole log is {log}; `muonscope doctor` looks for common causes",
            )
        try:
            client.readiness()
        except (ServiceUnreachable, ServiceFailed) as error:
            reason = str(error)
            stands_by = _STANDS_BY.search(reason)
            # A leader that is gone is waited for: its lease runs out, and the started service takes over.
            if stands_by is not None and answers(stands_by[1]):
                raise _StandsBy(stands_by[1]) from None
            time.sleep(_POLL_S)
        else:
            return
    raise ServiceStartFailed(
        f"the service was not ready within {START_LIMIT_S:g} s ({reason}):\n{_tail(log)}",
        remedy=f"the whole log is {log}; `muonscope doctor` looks for common causes",
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the service to end, wait, and kill what is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(log: Path) -> str:
    with log.open(encoding="utf-8", errors="replace") as lines:
        return "".join(deque(lines, _SHOWN_LOG_LINES)).rstrip()


@contextmanager
def _free_port() -> Iterator[int]:
    """Yield the usual port when it is free, else any that is.

    The service listens there a second or two later. Until it has ended, no other command takes the usual port for free:
    one that did would be answered by this one's service, and train into its store.
    """
    claim = _claim(DEFAULT_PORT)
    try:
        found = next(filter(None, map(_bindable, (DEFAULT_PORT, 0) if claim else (0,))), None)
        if found is None:
            raise ServiceStartFailed(
                "no port on 127.0.0.1 can be bound", remedy="end some of the programs that listen there"
            )
        yield found
    finally:
        if claim is not None:
            claim.close()


def _bindable(port: int) -> int | None:
    """Return a port that a server can bind, of 0 any; None where it is taken."""
    with socket.socket() as probe:
        # As servers bind: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def _claim(port: int) -> IO[str] | None:
    """Keep a port from this user's other commands here, until what is returned is closed; None: one of them has it."""
    lock = Path(tempfile.gettempdir(), f"muonscope-{os.getuid()}-port-{port}.lock")
    try:
        file = lock.open("a")
    except OSError:
        return None
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
