"""Ray's Jobs API on a real port, jobs as rows: for tests of several controllers on one cluster."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeRay:
    """Takes jobs, shows them as running, and counts how often each was asked for."""

    def __init__(self, gpus: float) -> None:
        self.gpus = gpus
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submissions: Counter[str] = Counter()
        self.address = ""
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        with self._lock:
            parts = path.partition("?")[0].strip("/").split("/")
            if parts == ["api", "jobs"]:
                return self._submit(json.loads(body)) if method == "POST" else (200, list(self.jobs.values()))
            if parts[:2] == ["api", "jobs"]:
                return self._one(parts[2], parts[3:])
            if parts == ["api", "v0", "nodes"]:
                node = {"node_id": "n", "node_ip": "127.0.0.1", "state": "ALIVE", "resources_total": {"GPU": self.gpus}}
                return 200, {"data": {"result": {"result": [node]}}}
            return 200, {"data": {}}

    def _submit(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = asked["submission_id"]
        self.submissions[name] += 1
        if name in self.jobs:
            return 400, f"Job with submission_id {name} already exists"
        self.jobs[name] = {"submission_id": name, "status": "RUNNING", "metadata": asked["metadata"]}
        self.jobs[name]["entrypoint"] = asked["entrypoint"]
        return 200, {"submission_id": name}

    def _one(self, name: str, verb: list[str]) -> tuple[int, Any]:
        if name not in self.jobs:
            return 404, "no such job"
        if verb == ["stop"]:
            self.jobs[name]["status"] = "STOPPED"
        return 200, {"logs": ""} if verb == ["logs"] else self.jobs[name]


@contextmanager
def fake_ray(gpus: float) -> Iterator[FakeRay]:
    """Serve for the block."""
    ray = FakeRay(gpus)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = ray.answer(self.command, self.path, body)
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _handle

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    ray.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield ray
    finally:
        server.shutdown()
        server.server_close()
