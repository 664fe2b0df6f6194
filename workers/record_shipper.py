"""The shipper of a script that records itself: it alone speaks with the service, from a process of its own.

    python -m workers.record_shipper DIRECTORY

Beside the spool's own files (`workers.spool`) the directory holds

    facts.json      what the recorder found out, sent first
    outcome.json    how the script ended, written by the script before it lets go of the spool

It outlives the script. When the writer is gone and all is shipped it reports the outcome, or that the script ended
without a word, and removes the directory: a gone directory is how the script knows that everything has arrived.
"""

import json
import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from muonscope.contract.attempts import AttemptOutcome, Failure, Heartbeat
from muonscope.contract.status import AttemptStatus, FailureKind
from workers import shipper
from workers.controller_client import Pauses
from workers.errors import AttemptSuperseded, ControllerAway, ControllerRefused
from workers.shipper import POLL_S, Door, Shipper
from workers.spool import is_writer_alive, remove_spool, replace_text

FACTS: Final = "facts.json"
OUTCOME: Final = "outcome.json"
HEARTBEAT_S: Final = 10.0
# How long a script that has ended is spoken for while the service is away.
PATIENCE_S: Final = 24 * 3600.0

logger = logging.getLogger(__name__)


def ship_record(directory: Path, door: Door | None = None) -> None:
    """Carry one record to its end, wherever that is found: the script's, a refusal's, or patience's.

    Args:
        directory: the spool.
        door: takes the messages; None is the service that the spool names.
    """
    try:
        with closing(_RecordShipper(directory, door=door)) as work:
            work.run()
    except FileNotFoundError:
        # Another shipper has brought this record home meanwhile.
        return


class _RecordShipper(Shipper):
    """A shipper that also says how the script is and how it ended."""

    _has_sent_facts = False
    _has_said_outcome = False
    _next_heartbeat = 0.0

    def run(self) -> None:
        pauses = Pauses()
        orphaned_at: float | None = None
        while True:
            # Asked before the read: what a writer wrote before it vanished is then surely in what is read.
            alive = is_writer_alive(self.directory)
            orphaned_at = None if alive else orphaned_at or time.monotonic()
            try:
                if not self._ship(alive):
                    return
            except ControllerAway as away:
                if orphaned_at is not None and time.monotonic() - orphaned_at > PATIENCE_S:
                    logger.warning("%s was not brought home", self.directory, extra={"action": "record_left"})
                    return
                time.sleep(pauses.next(away.retry_after_s))
                continue
            except ControllerRefused as refusal:
                self._remember_refusal(refusal)
                return
            pauses.reset()

    def _ship(self, alive: bool) -> bool:
        """Send what is due; returns whether there will be more."""
        if not self._has_sent_facts:
            self._client.post("facts", (self.directory / FACTS).read_bytes())
            self._has_sent_facts = True
        count = self.ship_once()
        if not count and not alive:
            self._say_outcome()
            remove_spool(self.directory)
            return False
        if time.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + HEARTBEAT_S
            sign = Heartbeat(status=AttemptStatus.RUNNING, steps_recorded=self.shipped.records)
            self._client.post("heartbeat", sign.model_dump_json().encode())
        if not self.is_behind:
            time.sleep(POLL_S)
        return True

    def _say_outcome(self) -> None:
        is_repeat, self._has_said_outcome = self._has_said_outcome, True
        try:
            self._client.post("outcome", self._outcome().model_dump_json(exclude_none=True).encode())
        except AttemptSuperseded:
            # Only the answer to the first one was lost: the record is closed by it.
            if not is_repeat:
                raise

    def _outcome(self) -> AttemptOutcome:
        try:
            return AttemptOutcome.model_validate_json((self.directory / OUTCOME).read_bytes())
        except FileNotFoundError:
            message = "the script ended without a word: it was killed, or its machine failed"
            failure = Failure(kind=FailureKind.WORKER_DIED, message=message)
            return AttemptOutcome(status=AttemptStatus.FAILED, declared_steps=self.shipped.records, failure=failure)

    def _remember_refusal(self, refusal: ControllerRefused) -> None:
        kept = {"offset": self.shipped.offset, "records": self.shipped.records, "refused": str(refusal)}
        replace_text(self.directory / "shipped.json", json.dumps(kept))


if __name__ == "__main__":
    shipper.main(ship_record)
