"""The API with its real middleware and store, and a controller that does nothing but count."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from muonscope.contract.attempts import Failure
from muonscope.contract.status import RunStatus
from service.api import (
    attempts,
    compare,
    deletion,
    experiments,
    imports,
    load,
    metrics,
    problems,
    recordings,
    runs,
    steps,
)
from service.api.middleware import BodyLimit, Problems
from service.controller.retry_policy import RetryPolicy, retry_reason
from service.controller.transitions import LEGAL
from service.settings import Settings
from tests.documented import hold_to_document


class FakeController:
    """The controller's face without a controller behind it."""

    legal: Mapping[RunStatus, Collection[RunStatus]] = LEGAL

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.wakes = 0
        self.max_attempts = 1

    def wake(self) -> None:
        self.wakes += 1

    def retry_reason(self, failure: Failure | None, attempts: int) -> str | None:
        return retry_reason(failure, attempts, RetryPolicy(max_attempts=self.max_attempts))

    async def stop_job(self, submission_id: str) -> None:
        return None

    async def job_logs(self, submission_id: str) -> str | None:
        return None

    async def cluster(self) -> Mapping[str, Any]:
        return {}

    def most_gpus(self) -> float | None:
        return 8.0

    def total_gpus(self) -> float | None:
        return 8.0


def application(**settings: Any) -> FastAPI:
    """Build the API; a test puts a store and a controller on its state."""
    rooms = (runs, steps, load, deletion, imports, recordings, metrics, attempts, compare, experiments)
    app = FastAPI(routes=[route for room in rooms for route in room.router.routes])
    app.state.settings = Settings(**settings)
    problems.install(app)
    limits = app.state.settings
    app.add_middleware(
        BodyLimit,
        max_bytes=limits.max_body_bytes,
        max_telemetry_bytes=limits.max_telemetry_bytes,
        timeout_s=limits.body_timeout_s,
    )
    app.add_middleware(Problems)
    return app


def wait_for_the_rest(app: FastAPI) -> None:
    """Wait until all requests are over, with what they do after their answers."""
    deadline = time.monotonic() + 60
    while app.state.under_way:
        assert time.monotonic() < deadline, app.state.under_way
        time.sleep(0.005)


@contextmanager
def served(app: FastAPI) -> Iterator[httpx.Client]:
    """Serve the application on a free port and give a client of it."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False) as client:
            client.event_hooks = {"response": [hold_to_document]}
            app.state.under_way = server.server_state.tasks
            yield client
    finally:
        server.should_exit = True
        thread.join()
