"""What carries a script's record home goes on after whatever went wrong once."""

import json
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from muonscope import recording
from muonscope.cli.record_keeper import RecordFile, keep_record
from muonscope.contract.attempts import AttemptFacts
from muonscope.contract.run_spec import ExternalTask, RunSpec
from muonscope.contract.telemetry import StepRecord
from workers import shipper
from workers.errors import AttemptSuperseded, ControllerAway
from workers.record_shipper import FACTS, ship_record
from workers.spool import Destination, Shipped, SpoolWriter, replace_text


def test_a_record_file_that_is_away_for_a_while_is_gone_on_with(tmp_path: Path) -> None:
    file, directory = tmp_path / "mine.db", tmp_path / "spool"
    writer = SpoolWriter(directory, Destination(f"file://{file}", "file-1", "", 1))
    writer.append(StepRecord(0, overflow=False, discarded=False, loss=1.0))
    replace_text(directory / FACTS, AttemptFacts().model_dump_json())
    spec = RunSpec(task=ExternalTask(is_open_ended=True))
    replace_text(directory / "spec.json", json.dumps({"file": str(file), "spec": spec.model_dump_json()}))
    door = RecordFile(file)
    run_id, attempt_id = door.begin(spec)
    door.close()
    replace_text(directory / "begun.json", json.dumps({"run_id": run_id, "attempt_id": attempt_id}))
    writer.close()
    away = file.rename(tmp_path / "away.db")
    file.mkdir()

    with pytest.raises(Exception, match="unable to open"):
        keep_record(directory)
    file.rmdir()
    away.rename(file)
    keep_record(directory)

    with closing(sqlite3.connect(file)) as database:
        ((status, steps),) = database.execute("SELECT status, (SELECT steps FROM run_summary) FROM run")
    assert (status, steps) == ("failed", 1)
    assert not directory.exists()


def test_a_shipper_that_does_not_start_is_started_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, tries = threading.Event(), []

    def start(directory: Path, module: str) -> None:
        tries.append(module)
        if len(tries) == 1:
            raise subprocess.TimeoutExpired("python", 30)
        over.set()

    monkeypatch.setattr(shipper, "start_detached", start)
    monkeypatch.setattr(recording, "_CHECK_S", 0.0)

    recording._keep_shipping(tmp_path, "workers.record_shipper", over)

    assert tries == ["workers.record_shipper"] * 2


class LostAnswer:
    """A controller that takes the outcome, and whose answer to it does not arrive."""

    def __init__(self, *, is_lost: bool) -> None:
        self.taken: list[str] = []
        self._is_lost = is_lost

    def post(self, verb: str, body: bytes, content_type: str = "application/json") -> bytes:
        if verb == "outcome":
            if not self._is_lost or verb in self.taken:
                raise AttemptSuperseded("http://controller", 409, "it has ended as succeeded")
            self.taken.append(verb)
            raise ControllerAway("http://controller", "the connection was cut")
        self.taken.append(verb)
        return b""

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_outcome_whose_answer_was_lost_has_arrived(
    is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.controller_client.FIRST_PAUSE_S", 0.0)
    directory = tmp_path / "spool"
    writer = SpoolWriter(directory, Destination("http://controller", "run-1-a1", "", 1))
    writer.append(StepRecord(0, overflow=False, discarded=False))
    replace_text(directory / FACTS, AttemptFacts().model_dump_json())
    writer.close()

    ship_record(directory, LostAnswer(is_lost=is_lost))

    # The counter-test: the first outcome that is refused is one that did not arrive, and its record is kept.
    assert directory.exists() is not is_lost
    assert is_lost or "409" in (Shipped.read(directory).refused or "")
