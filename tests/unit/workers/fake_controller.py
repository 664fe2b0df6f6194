"""A controller that keeps everything in memory, at the job's own seam: `muonscope/contract/attempts.py` over HTTP."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from muonscope.contract.attempts import (
    AttemptFacts,
    AttemptOutcome,
    CheckpointFact,
    CheckpointReport,
    Enrolled,
    Enrolment,
    Heartbeat,
    HeartbeatReply,
    LoadReport,
    LoadSample,
    LogAccepted,
    LogPiece,
    StepsAccepted,
)
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.telemetry import StepRecord, decode_batch


@dataclass
class FakeController:
    """One attempt's controller. It can be taken away, made to ask for a stop, or superseded."""

    spec: RunSpec = field(default_factory=RunSpec)
    heartbeat_s: float = 0.2
    stall_limit_s: float = 60.0
    resume_step: int = 0
    attempt_id: str = "run-test-a1"
    enrolment_token: str = "once"
    token: str = "attempt-token"
    epoch: int = 1
    run_id: str = "test"

    def __post_init__(self) -> None:
        self.records: dict[int, StepRecord] = {}
        self.repeats = 0
        self.facts: dict[str, Any] = {}
        self.heartbeats: list[Heartbeat] = []
        self.checkpoints: list[CheckpointFact] = []
        self.logs: dict[int | None, str] = {}
        self.load: list[LoadSample] = []
        self.outcome: AttemptOutcome | None = None
        self.enrolments = 0
        self.batches: list[int] = []
        self.stop_requested = False
        self.superseded = False
        self.answers_before_failing: int | None = None
        self.outcome_at: float | None = None
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Begin to answer; after `stop`, on the same port."""
        controller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = controller.answer(self.path, self.headers.get("Authorization"), body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Keep the test's output clean."""

        ThreadingHTTPServer.allow_reuse_address = True
        ThreadingHTTPServer.daemon_threads = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Go away: connections are refused from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def supersede(self) -> int:
        """Take nothing more of this attempt; returns how many records were taken."""
        with self._lock:
            self.superseded = True
            return len(self.records)

    def answer(self, path: str, authorization: str | None, body: bytes) -> tuple[int, bytes]:
        """Handle one request as the contract says."""
        with self._lock:
            if self._server is None:
                return 503, b'{"detail":"away"}'
            verb = path.removeprefix(f"/attempts/{self.attempt_id}/")
            if verb == "enrol":
                return self._enrol(body)
            if authorization != f"Bearer {self.token}":
                return 401, b'{"detail":"not this attempt"}'
            if self.superseded:
                return 409, b'{"detail":"epoch 1 is superseded: the run is at epoch 2"}'
            handlers = {
                "facts": self._facts,
                "steps": self._steps,
                "heartbeat": self._beat,
                "checkpoints": self._take_checkpoints,
                "logs": self._take_log,
                "load": self._take_load,
                "outcome": self._end,
            }
            return handlers[verb](body)

    def _enrol(self, body: bytes) -> tuple[int, bytes]:
        self.enrolments += 1
        enrolment = Enrolment.model_validate_json(body)
        if enrolment.token != self.enrolment_token or self.enrolments > 1:
            return 409, b'{"detail":"this token was used before"}'
        enrolled = Enrolled(
            spec=self.spec,
            run_id=self.run_id,
            attempt=1,
            epoch=self.epoch,
            token=self.token,
            heartbeat_s=self.heartbeat_s,
            stall_limit_s=self.stall_limit_s,
            resume_step=self.resume_step,
        )
        return 200, enrolled.model_dump_json().encode()

    def _take_load(self, body: bytes) -> tuple[int, bytes]:
        self.load.extend(LoadReport.model_validate_json(body).samples)
        return 204, b""

    def _facts(self, body: bytes) -> tuple[int, bytes]:
        facts = AttemptFacts.model_validate_json(body)
        self.facts.update({name: getattr(facts, name) for name in facts.model_fields_set})
        return 204, b""

    def _steps(self, body: bytes) -> tuple[int, bytes]:
        if self.answers_before_failing is not None:
            if self.answers_before_failing == 0:
                return 503, b'{"detail":"busy"}'
            self.answers_before_failing -= 1
        batch = decode_batch(body)
        assert batch.epoch == self.epoch
        for record in batch.records:
            known = self.records.get(record.step)
            if known is None:
                self.records[record.step] = record
            elif repr(known) == repr(record):
                self.repeats += 1
            else:
                return 409, b'{"detail":"a different record is stored for this step"}'
        self.batches.append(len(batch.records))
        accepted = StepsAccepted(stored=len(batch.records), next_step=max(self.records) + 1)
        return 200, accepted.model_dump_json().encode()

    def _beat(self, body: bytes) -> tuple[int, bytes]:
        self.heartbeats.append(Heartbeat.model_validate_json(body))
        return 200, HeartbeatReply(stop_requested=self.stop_requested).model_dump_json().encode()

    def _take_checkpoints(self, body: bytes) -> tuple[int, bytes]:
        self.checkpoints = list(CheckpointReport.model_validate_json(body).checkpoints)
        return 204, b""

    def _take_log(self, body: bytes) -> tuple[int, bytes]:
        piece = LogPiece.model_validate_json(body)
        self.logs[piece.rank] = self.logs.get(piece.rank, "") + piece.text
        return 200, LogAccepted(stop=piece.stop).model_dump_json().encode()

    def _end(self, body: bytes) -> tuple[int, bytes]:
        self.outcome = AttemptOutcome.model_validate_json(body)
        self.outcome_at = time.time()
        return 204, b""


@contextmanager
def running(**settings: Any) -> Iterator[FakeController]:
    """Yield a controller that answers."""
    controller = FakeController(**settings)
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()


def wait_until(condition: Any, timeout_s: float = 60.0, what: str = "the condition") -> None:
    """Wait for a condition to hold; AssertionError naming it otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s} s"
        time.sleep(0.02)
