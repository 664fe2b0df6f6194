"""Writes a script's record into a file of its own: the shipper's work, with a database at the end of the way.

    python -m muonscope.cli.record_keeper DIRECTORY

The file is a whole database of this version's schema, which `muonscope import` reads and `muonscope up
--database-url` shows as it is. `spec.json` in the spool's directory names it; `begun.json` answers with the run's id,
or with what went wrong.
"""

import json
from pathlib import Path
from typing import Final

from muonscope.contract.attempts import AttemptFacts, AttemptOutcome
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.telemetry import decode_batch
from service.conclusion import accept_outcome
from service.controller.transitions import LEGAL
from service.recordings import begin_recording
from service.settings import sqlite_url
from service.store import migrate
from service.store.attempts import AttemptRepository
from service.store.session import Database
from service.store.steps import StepRepository
from workers import shipper
from workers.record_shipper import ship_record
from workers.spool import replace_text

_WHO: Final = "record"
# Nobody but this process could close the record.
_LEASE_S: Final = 7 * 86400.0


class RecordFile:
    """The door of one attempt in a record file: takes what a controller would."""

    def __init__(self, path: Path) -> None:
        """Open the file, made where there is none."""
        self._database = Database(sqlite_url(path))
        migrate.upgrade(self._database)
        self._attempt_id = ""

    def begin(self, spec: RunSpec) -> tuple[str, str]:
        """Make the run; returns its id and its attempt's."""
        with self._database.write() as session:
            attempt, _ = begin_recording(
                session, spec, lease_s=_LEASE_S, legal=LEGAL, who=_WHO, why="recorded as it trains"
            )
            return attempt.run.uid, attempt.submission_id

    def go_on(self, attempt_id: str) -> None:
        """Take what comes for this attempt."""
        self._attempt_id = attempt_id

    def post(self, verb: str, body: bytes, content_type: str = "application/json") -> bytes:
        """Store one message."""
        with self._database.write() as session:
            attempts = AttemptRepository(session)
            attempt = attempts.get(self._attempt_id)
            if verb == "steps":
                StepRepository(session).insert(attempt, decode_batch(body))
            elif verb == "facts":
                attempts.add_facts(attempt, AttemptFacts.model_validate_json(body))
            elif verb == "outcome" and not attempt.status.is_terminal:
                accept_outcome(
                    session, attempt, AttemptOutcome.model_validate_json(body), legal=LEGAL,
                    retry_reason=lambda failure, attempts: None,
                )  # fmt: skip
        return b""

    def close(self) -> None:
        """Let go of the file."""
        self._database.dispose()


def keep_record(directory: Path) -> None:
    """Carry one spool into the record file that its `spec.json` names."""
    begun = directory / "begun.json"
    try:
        wanted = json.loads((directory / "spec.json").read_text())
        file = RecordFile(Path(wanted["file"]))
        if begun.exists():
            attempt_id = str(json.loads(begun.read_text())["attempt_id"])
        else:
            run_id, attempt_id = file.begin(RunSpec.model_validate_json(wanted["spec"]))
            replace_text(begun, json.dumps({"run_id": run_id, "attempt_id": attempt_id}))
    except Exception as error:
        # Whatever it is, the script waits for an answer; one that was given stays: whoever comes next goes on by it.
        if not begun.exists():
            replace_text(begun, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    file.go_on(attempt_id)
    ship_record(directory, file)


if __name__ == "__main__":
    shipper.main(keep_record)
