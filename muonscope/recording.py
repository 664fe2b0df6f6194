"""Record a training script of one's own: `with muonscope.record(engine, name="mine"):` around its loop.

Rank 0 appends each step to a spool on its disk, and a small process beside it brings the spool to the service, or
into a record file: neither a slow service nor a killed script costs a step or holds one up. Torch and DeepSpeed come
in with the engine alone.
"""

import json
import logging
import secrets
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from muonscope.errors import RecordingFailed

if TYPE_CHECKING:
    from muonscope.contract.attempts import AttemptOutcome, Failure, FinalState
    from muonscope.contract.recordings import RecordingStarted
    from muonscope.contract.run_spec import RunSpec
    from muonscope.contract.telemetry import StepRecord
    from workers.recorder import Recorder
    from workers.spool import SpoolWriter

logger = logging.getLogger(__name__)

_SHIPPER: Final = "workers.record_shipper"
_FILE_KEEPER: Final = "muonscope.cli.record_keeper"
_START_LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.05
_CHECK_S: Final = 1.0


def record(
    engine: Any,
    *,
    name: str,
    url: str | None = None,
    token: str | None = None,
    file: str | Path | None = None,
    steps: int | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    patience_s: float = 30.0,
) -> "RecordedLoop":
    """Record every step that `engine` takes inside the `with` block, and change none of them.

    Collective: every rank enters and leaves the block; rank 0 sends.

    Args:
        engine: as `deepspeed.initialize` returned it, with ZeRO stage 1, 2 or 3: DeepSpeed's own Muon, any Adam, or
            one that `muon_core.attach` has seen.
        name: the run's, as the table of runs shows it.
        url: address of the service; by default `MUONSCOPE_URL`, else http://127.0.0.1:8800.
        token: bearer token; by default `MUONSCOPE_TOKEN`.
        file: a record file to write instead: no service is needed, and `muonscope import FILE` brings it in later.
        steps: how many steps there are to be: a loop that is left before has been stopped, and trains only if that many
            were attempted.
        tags: the run's.
        notes: the run's.
        patience_s: how long the end of the block waits for the last steps to arrive; after that a process of its own
            goes on trying.
    Returns:
        The context manager; `run_id` names the run inside the block and after it.
    Raises:
        ServiceUnreachable: nothing answers there; on entering, and on the other ranks RecordingFailed.
        RecordingFailed: the file or the spool cannot be written; on entering, on every rank.
        UnsupportedSetup: an engine whose momentum cannot be read; on entering.
    """
    wanted = _Wanted(name, url, token, None if file is None else Path(file), steps, tuple(tags), notes, patience_s)
    return RecordedLoop(engine, wanted)


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    url: str | None
    token: str | None
    file: Path | None
    steps: int | None
    tags: tuple[str, ...]
    notes: str
    patience_s: float


class RecordedLoop:
    """A loop that is recorded, or was."""

    run_id: str | None = None
    """The run's id, on every rank; None before the block."""

    def __init__(self, engine: Any, wanted: _Wanted) -> None:
        self._engine, self._wanted = engine, wanted
        self._recorder: Recorder | None = None
        self._spool: SpoolWriter | None = None
        self._cut_short: Failure | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        from workers.recorder import Recorder, describe_spec

        self._recorder = Recorder(self._engine, self._keep)
        facts = self._recorder.facts()
        problem: Exception | None = None
        if self._recorder.rank == 0:
            wanted = self._wanted
            try:
                spec = describe_spec(
                    self._recorder, self._engine, name=wanted.name, steps=wanted.steps, tags=wanted.tags,
                    notes=wanted.notes,
                )  # fmt: skip
                self._open(spec, facts.model_dump_json(exclude_none=True, fallback=str))
            except OSError as error:
                problem = RecordingFailed(
                    f"the spool cannot be kept: {error}", remedy="set TMPDIR to a folder of your own that has room"
                )
                problem.__cause__ = error
            except Exception as error:
                # Raised once the others know: they wait for a word of this rank.
                problem = error
            if problem is not None:
                self._give_up()
        self._agree(problem)
        self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._recorder is not None
        self._recorder.stop()
        final = self._final_state(error)
        if self._spool is None:
            return
        outcome = _outcome(error, self._recorder, self._spool.records, self._cut_short, steps=self._wanted.steps)
        self._close(outcome.model_copy(update={"final": final}))

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _keep(self, record: "StepRecord") -> None:
        from muonscope.contract.status import FailureKind
        from workers.errors import SpoolFull
        from workers.failure import describe

        if self._spool is None or self._cut_short is not None:
            return
        try:
            self._spool.append(record)
        except (OSError, SpoolFull) as error:
            # Raised in the script's own step, it would end the training, and leave the other ranks waiting for it.
            cause = describe(error, rank=0, step=record.step, default=FailureKind.RECORD_INCOMPLETE)
            self._cut_short = cause.failure
            logger.warning(
                "the record of %s ends before step %d, and the training goes on without it: %s",
                self.run_id, record.step, error, extra={"action": "record_cut_short"},
            )  # fmt: skip

    def _open(self, spec: "RunSpec", facts: str) -> None:
        from workers.record_shipper import FACTS
        from workers.spool import Destination, SpoolWriter, replace_text, spool_directory

        started = self._register(spec) if self._wanted.file is None else None
        if started is not None:
            attempt_id, url = started.attempt_id, self._url()
            destination = Destination(url, attempt_id, started.token, started.epoch)
            self.run_id = started.run_id
        else:
            attempt_id = f"file-{secrets.token_hex(8)}"
            destination = Destination(f"file://{self._wanted.file}", attempt_id, "", epoch=1)
        directory = spool_directory(attempt_id)
        self._spool = SpoolWriter(directory, destination)
        replace_text(directory / FACTS, facts)
        if self._wanted.file is not None:
            self._begin_file(directory, self._wanted.file, spec)
        module = _SHIPPER if self._wanted.file is None else _FILE_KEEPER
        threading.Thread(
            target=_keep_shipping, args=(directory, module, self._is_over), name="shipper-keeper", daemon=True
        ).start()

    def _url(self) -> str:
        from muonscope.client.settings import ClientSettings, checked_url

        return checked_url(self._wanted.url or ClientSettings().url)

    def _register(self, spec: "RunSpec") -> "RecordingStarted":
        from muonscope.client import Client
        from muonscope.client.calls import start_recording

        with Client(self._wanted.url, token=self._wanted.token) as client:
            return client.send(start_recording(spec))

    def _begin_file(self, directory: Path, file: Path, spec: "RunSpec") -> None:
        """Have the keeper make the run in the record file, and wait for its id."""
        from workers.shipper import start_detached
        from workers.spool import replace_text

        replace_text(
            directory / "spec.json", json.dumps({"file": str(file.absolute()), "spec": spec.model_dump_json()})
        )
        start_detached(directory, _FILE_KEEPER)
        deadline = time.monotonic() + _START_LIMIT_S
        begun = directory / "begun.json"
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        answer = json.loads(begun.read_text()) if begun.exists() else {"error": f"no answer in {_START_LIMIT_S:g} s"}
        if "error" in answer:
            raise RecordingFailed(
                f"{file} cannot be written: {answer['error']}", remedy="give another file, in a folder of your own"
            )
        self.run_id = str(answer["run_id"])

    def _give_up(self) -> None:
        """Leave nothing of a record that was not begun."""
        from workers.spool import remove_spool

        self._is_over.set()
        if self._spool is not None:
            self._spool.close()
            remove_spool(self._spool.directory)
            self._spool = None

    def _close(self, outcome: "AttemptOutcome") -> None:
        from workers.record_shipper import OUTCOME
        from workers.spool import Shipped, replace_text

        assert self._spool is not None
        directory = self._spool.directory
        try:
            replace_text(directory / OUTCOME, outcome.model_dump_json(exclude_none=True))
        except OSError as error:
            logger.warning("how %s ended is not kept: %s", self.run_id, error, extra={"action": "outcome_not_kept"})
        self._spool.close()
        deadline = time.monotonic() + self._wanted.patience_s
        refused = None
        while directory.exists() and refused is None and time.monotonic() < deadline:
            refused = Shipped.read(directory).refused
            time.sleep(_LOOK_S)
        self._is_over.set()
        if refused is not None:
            logger.warning("the record of %s was refused: %s", self.run_id, refused, extra={"action": "record_refused"})
        elif directory.exists():
            logger.warning(
                "the record of %s is still on its way, from %s",
                self.run_id,
                directory,
                extra={"action": "record_waits"},
            )

    # -- every rank --------------------------------------------------------------------------------------------------

    def _final_state(self, error: BaseException | None) -> "FinalState | None":
        """Say what moved, where every rank is there to say it; a rank that has raised alone is not waited for."""
        assert self._recorder is not None
        # At an exhausted loss scale all raise at the same step.
        if not self._recorder.do_all_come(error is None or self._recorder.is_exhausted):
            return None
        try:
            return self._recorder.final_state()
        except RuntimeError as gone:
            logger.warning("what moved in %s is not known: %s", self.run_id, gone, extra={"action": "no_final_state"})
            return None

    def _agree(self, problem: Exception | None) -> None:
        """Have every rank know the id, or raise rank 0's problem: one that trained on alone would wait for ever."""
        assert self._recorder is not None
        if self._recorder.group is not None:
            import torch.distributed as dist

            refusal = None if problem is None else (str(problem), getattr(problem, "remedy", None))
            said: list[Any] = [self.run_id, refusal]
            dist.broadcast_object_list(said, src=0, group=self._recorder.group)
            self.run_id, refusal = said
            if problem is None and refusal is not None:
                message, remedy = refusal
                raise RecordingFailed(f"rank 0 cannot record: {message}", remedy=remedy)
        if problem is not None:
            raise problem


def _outcome(
    error: BaseException | None,
    recorder: "Recorder",
    records: int,
    cut_short: "Failure | None",
    *,
    steps: int | None,
) -> "AttemptOutcome":
    from muonscope.contract.attempts import AttemptOutcome, Failure
    from muonscope.contract.status import AttemptStatus, FailureKind
    from workers.failure import describe

    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        if cut_short is not None:
            return AttemptOutcome(status=AttemptStatus.FAILED, declared_steps=records, failure=cut_short)
        # A loop that is left early, as one that has learned enough, has not attempted every step.
        is_whole = steps is None or records >= steps
        return AttemptOutcome(
            status=AttemptStatus.SUCCEEDED if is_whole else AttemptStatus.STOPPED, declared_steps=records
        )
    if not isinstance(error, Exception):
        return AttemptOutcome(status=AttemptStatus.STOPPED, declared_steps=records)
    if recorder.is_exhausted:
        failure = Failure(kind=FailureKind.LOSS_SCALE_EXHAUSTED, step=recorder.step, message=str(error))
    else:
        failure = describe(error, rank=recorder.rank, step=recorder.step).failure
    return AttemptOutcome(status=AttemptStatus.FAILED, declared_steps=records, failure=failure)


def _keep_shipping(directory: Path, module: str, is_over: threading.Event) -> None:
    """Start the shipper, and another one whenever it has died."""
    from workers.shipper import is_shipper_alive, start_detached
    from workers.spool import Shipped

    while not is_over.is_set() and directory.exists():
        if Shipped.read(directory).refused is not None:
            return
        if not is_shipper_alive(directory):
            try:
                start_detached(directory, module)
            except (OSError, subprocess.SubprocessError) as error:
                # The next look tries again; the record waits in its spool.
                logger.warning("no shipper for %s: %s", directory, error, extra={"action": "shipper_not_started"})
        is_over.wait(_CHECK_S)
