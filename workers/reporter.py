"""The reporter: the driver's thread that speaks with the controller while training goes on.

Others leave it news; it sends them when the controller listens, and keeps them while it does not.
"""

import logging
import threading
import time
from typing import Any

from muonscope.contract.attempts import AttemptFacts, AttemptOutcome, CheckpointReport, Heartbeat, HeartbeatReply
from muonscope.contract.status import AttemptStatus, Phase
from workers.controller_client import ControllerClient, Pauses, until_answered
from workers.errors import AttemptSuperseded, ControllerAway, ControllerRefused

logger = logging.getLogger(__name__)


class Reporter:
    """Sends facts as they come in and a heartbeat every `heartbeat_s`."""

    def __init__(self, client: ControllerClient, heartbeat_s: float) -> None:
        self.stop_requested = threading.Event()
        self.superseded = threading.Event()
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}
        self._phases: dict[Phase, float] = {}
        self._has_news = False
        self._checkpoints: CheckpointReport | None = None
        self._told_checkpoints: CheckpointReport | None = None
        self._heartbeat = Heartbeat(status=AttemptStatus.PENDING)
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, phases: dict[Phase, float] | None = None, **facts: Any) -> None:
        """Leave facts to be sent; equal to what was told before, they are no news."""
        with self._lock:
            merged_phases = {**self._phases, **(phases or {})}
            merged_facts = {**self._facts, **facts}
            if merged_phases == self._phases and merged_facts == self._facts:
                return
            self._phases, self._facts, self._has_news = merged_phases, merged_facts, True
        self._wake.set()

    def tell_checkpoints(self, report: CheckpointReport) -> None:
        """Leave which checkpoints are there; sent when it differs from what was sent before."""
        self._checkpoints = report
        if report != self._told_checkpoints:
            self._wake.set()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Set what the next heartbeats say."""
        self._heartbeat = heartbeat

    def end(self, patience_s: float = 5.0) -> None:
        """End the thread; what it has not sent is kept."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=patience_s)

    def finish(self, outcome: AttemptOutcome, patience_s: float, give_up: threading.Event) -> None:
        """End the thread, send the last facts and then the outcome, whether or not the facts are taken.

        Raises:
            ControllerAway: the controller did not come back in time.
            ControllerRefused: it will not take the outcome.
        """
        self.end(patience_s)
        body = outcome.model_dump_json(exclude_none=True).encode()

        def send() -> None:
            self._send_news()
            self._client.post("outcome", body)

        until_answered(send, patience_s=patience_s, give_up=give_up)

    def _run(self) -> None:
        pauses, next_heartbeat = Pauses(), time.monotonic()
        while not self._ending.is_set():
            try:
                self._send_news()
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + self._heartbeat_s
                    self._send_heartbeat()
                pauses.reset()
                wait_s = max(0.0, next_heartbeat - time.monotonic())
            except ControllerAway as away:
                wait_s = pauses.next(away.retry_after_s)
            except AttemptSuperseded:
                self.superseded.set()
                return
            except ControllerRefused:
                # Not understood, and saying it again at once will not help.
                wait_s = self._heartbeat_s
            self._wake.wait(wait_s)
            self._wake.clear()

    def _send_news(self) -> None:
        """Send what is new; what the controller will not take keeps neither the rest nor a heartbeat back."""
        for send in (self._send_facts, self._send_checkpoints):
            try:
                send()
            except AttemptSuperseded:
                raise
            except ControllerRefused as refusal:
                logger.warning("not taken: %s", refusal, extra={"action": "news_refused"})

    def _send_facts(self) -> None:
        with self._lock:
            if not self._has_news:
                return
            facts, self._has_news = AttemptFacts(phases=self._phases, **self._facts), False
        try:
            self._client.post("facts", facts.model_dump_json(exclude_none=True).encode())
        except ControllerAway:
            self._has_news = True
            raise

    def _send_checkpoints(self) -> None:
        report = self._checkpoints
        if report is None or report == self._told_checkpoints:
            return
        try:
            self._client.post("checkpoints", report.model_dump_json().encode())
        except ControllerRefused:
            # Not again: it would be refused again.
            self._told_checkpoints = report
            raise
        self._told_checkpoints = report

    def _send_heartbeat(self) -> None:
        answer = self._client.post("heartbeat", self._heartbeat.model_dump_json().encode())
        if HeartbeatReply.model_validate_json(answer or b"{}").stop_requested:
            self.stop_requested.set()
