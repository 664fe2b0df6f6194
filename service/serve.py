"""Runs the service in the foreground: binds the port, starts the application, ends cleanly on SIGINT and SIGTERM."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.errors import Unavailable
from service.settings import Settings
from service.store import migrate
from service.store.session import Database
from service.store.tokens import TokenRepository

logger = logging.getLogger(__name__)

ADDRESS_FILE: Final = "address.json"
_SHUTDOWN_S: Final = 5
_BACKLOG: Final = 2048
_DRAIN_LOOK_S: Final = 0.5


class AddressInUse(OSError):
    """The port is taken, or the address is not this machine's."""


class NoToken(Exception):
    """A token would be needed, and there is none: nobody could ask anything."""


def serve(settings: Settings, *, on_ready: Callable[[str], None] = lambda _: None, drain: bool = False) -> int:
    """Serve until a signal ends it.

    Args:
        settings: ours; port 0 takes a free one.
        on_ready: called with the address once runs can be submitted and started.
        drain: whether the first signal lets live runs end before the service does; submissions are still queued.
    Returns:
        0 after a clean end, 1 when the application could not start (it has logged why).
    Raises:
        AddressInUse: another program listens there.
        SchemaTooNew: the database is a newer version's.
        Unavailable: the database cannot be reached, read or made.
        NoToken: the settings ask for tokens, and the store has none that holds.
    """
    # Before the schema is touched: the port's holder may be an older service on the same database.
    listener = bind(settings.host, settings.port)
    try:
        _prepare_store(settings)
    except BaseException:
        listener.close()
        raise
    port = int(listener.getsockname()[1])
    app = create_app(settings.model_copy(update={"port": port}))
    server = Server(app, on_ready=on_ready, drain=drain)
    try:
        server.run(sockets=[listener])
    except SystemExit:
        # Uvicorn's own way to say that the application did not start; its code for it means a verdict here.
        return 1
    finally:
        server.forget_address()
    return 0 if server.started else 1


def _prepare_store(settings: Settings) -> None:
    """Find here what is wrong with the store: once the application starts, it would be a traceback in a log."""
    database = Database(settings.effective_database_url)
    try:
        migrate.upgrade(database)
        if not settings.is_token_needed:
            return
        with database.read() as session:
            if TokenRepository(session).count_usable():
                return
    finally:
        database.dispose()
    raise NoToken(
        f"the service is to be reached from elsewhere (host {settings.host}, {settings.effective_advertise_url}) or "
        "asks for tokens, and there is no token that anybody could show"
    )


def bind(host: str, port: int) -> socket.socket:
    """Listen before anything heavy starts: a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol, and with it on, a kept-alive
    # connection's answers wait some 40 ms: their body is held back until the client acknowledges their head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise AddressInUse(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.set_inheritable(False)
    return listener


class Server(uvicorn.Server):
    """Uvicorn, telling when runs can be submitted, and ending live views when it ends."""

    def __init__(self, app: FastAPI, *, on_ready: Callable[[str], None] = lambda _: None, drain: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=_SHUTDOWN_S,
                lifespan="on",
                ws="none",
            )
        )
        self._app = app
        self._address_file: Path = app.state.settings.home / ADDRESS_FILE
        self._on_ready = on_ready
        self._drain = drain
        self._drainer: asyncio.Task[None] | None = None
        self._announcer: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announcer = asyncio.create_task(self._announce())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own raises the signal again afterwards: a clean end would look like a killed process.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain and self._drainer is None and self.started:
            logger.info("draining: live runs end first; signal again to end now", extra={"action": "draining"})
            self._app.state.controller.close("the service is draining before it ends")
            self._drainer = asyncio.get_event_loop().create_task(self._end_when_drained())
            return
        if not self.should_exit:
            logger.info("ending", extra={"action": "ending"})
        # First: an exit that was asked for already makes an interrupt a forced one.
        super().handle_exit(sig, frame)
        self.end()

    def forget_address(self) -> None:
        """Take back the address that this service has left for commands, unless another one's is there by now."""
        with suppress(OSError):
            if self._address_file.read_text() == _address_text(self._app.state.settings.effective_advertise_url):
                self._address_file.unlink()

    def end(self) -> None:
        """Begin a clean end; from any thread."""
        # Live views would otherwise be waited for; they reconnect where they were.
        self._app.state.feed.close()
        self.should_exit = True

    async def _end_when_drained(self) -> None:
        controller: Any = self._app.state.controller
        while not self.should_exit:
            # A store that does not answer now says later what is live.
            with suppress(Unavailable):
                if not await asyncio.to_thread(controller.has_live_attempts):
                    break
            await asyncio.sleep(_DRAIN_LOOK_S)
        self.end()

    async def _announce(self) -> None:
        controller: Any = self._app.state.controller
        while controller.problems and not self.should_exit:
            await asyncio.sleep(0.05)
        if not self.should_exit:
            settings = self._app.state.settings
            try:
                await asyncio.to_thread(_write_address, self._address_file, settings.effective_advertise_url)
            except OSError as error:
                logger.warning("commands will not find this service by its home: %s", error,
                               extra={"action": "address_unwritten"})  # fmt: skip
            self._on_ready(settings.effective_advertise_url)


def _write_address(file: Path, address: str) -> None:
    """Leave the address where commands with the same home look for it; the newest service of a home is found."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(_address_text(address))
    beside.replace(file)


def _address_text(address: str) -> str:
    return json.dumps({"url": address})
