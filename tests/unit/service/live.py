"""The service as users meet it: uvicorn on a real socket, SQLite, and a cluster in memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.app import create_app
from service.serve import Server, bind
from service.settings import Settings
from tests.documented import hold_to_document
from tests.unit.controller.fakes import FakeLauncher


@contextmanager
def short_rests() -> Iterator[None]:
    """A controller rests after each tick for the sake of many writers: a test is a single one, and waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.controller.loop._LONGEST_REST_S", 0.05)
        yield


@contextmanager
def serving(
    home: Path, launcher: FakeLauncher, *, listen_port: int = 0, wait_until_ready: bool = True, **overrides: Any
) -> Iterator[httpx.Client]:
    """Serve for the block, on a free port unless one is given; give a client of it."""
    listener = bind("127.0.0.1", listen_port)
    port = listener.getsockname()[1]
    settings = Settings(**{"home": home, "tick_s": 0.2, "port": port, **overrides})
    server = Server(create_app(settings, launcher))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False) as client:
            deadline = time.monotonic() + 60
            while not server.started or client.get("/readyz" if wait_until_ready else "/healthz").status_code != 200:
                assert thread.is_alive()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            client.event_hooks = {"response": [hold_to_document]}
            yield client
    finally:
        server.end()
        thread.join(60)
        assert not thread.is_alive()
