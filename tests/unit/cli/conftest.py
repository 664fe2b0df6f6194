"""The command run in this process against a fake service on a real port."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from muonscope.cli.main import main
from tests.unit.client.fake_service import FakeService

LISTENS = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""
Start = Callable[..., str]
"""Starts what listens, and is called with words, in a folder; returns its address."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class RunCommand(Protocol):
    def __call__(self, *arguments: str) -> Result: ...


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCommand:
    """Run `muonscope` with these arguments, as the shell would."""

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["muonscope", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        captured = capfd.readouterr()
        return Result(code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err)

    return run


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """A fake service on a free port, which MUONSCOPE_URL names."""
    fake = FakeService()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = f"http://{self.headers['Host']}{self.path}"
            response = fake(httpx.Request(self.command, url, headers=dict(self.headers), content=body))
            content = response.read()
            self.send_response(response.status_code)
            for name in ("Content-Type", "Retry-After"):
                if name in response.headers:
                    self.send_header(name, response.headers[name])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = _answer

        def log_message(self, format: str, *arguments: object) -> None:
            """Keep the test's output to what the command prints."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            # A command that is interrupted does not wait for its answer: nothing to print into another test's output.
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv("MUONSCOPE_URL", f"http://127.0.0.1:{server.server_port}")
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nothing answers; no waiting between tries."""
    monkeypatch.setenv("MUONSCOPE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start what listens, and is called with these words, in a folder; returns its address."""
    with ExitStack() as started:

        def begin(*words: str, home: str | None, cwd: Path) -> str:
            environment = {name: value for name, value in os.environ.items() if name != "MUONSCOPE_HOME"}
            environment |= {"MUONSCOPE_HOME": home} if home is not None else {}
            process = started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", LISTENS, *words],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd,
                )
            )  # fmt: skip
            assert process.stdout is not None
            return f"http://127.0.0.1:{int(process.stdout.readline())}"

        yield begin
