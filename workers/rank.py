"""One rank's process: builds, trains in its main thread, answers polls from another one.

`serve` is its whole life, from the assignment to the result. It knows nothing of Ray: the actor that owns the rank
(`workers.train_worker`) stands between. Imports at module level stay light, for the driver reads these types too;
torch and DeepSpeed are imported by a thread that starts at once, where the fork server has not done it already.
"""

import json
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from muonscope.contract.attempts import FinalState, ParameterFact, RankFact
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind, MomentumUnit, Phase
from workers import system_load
from workers.background import Background
from workers.build_locks import remove_left_locks
from workers.environment import (
    keep_compiler_unloaded,
    prepare_environment,
    use_card_of,
)
from workers.failure import VERDICT_BEARING, RankFailure, describe
from workers.fork_client import Surroundings
from workers.logs import redirect_output
from workers.shipper import is_shipper_alive, start_detached
from workers.spool import Destination, Shipped, SpoolWriter, spool_directory, sweep_spools

SHIPPER_CHECK_S: Final = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank is to do; the same for all ranks but for `rank`."""

    spec: RunSpec
    rank: int
    destination: Destination
    """Whom the records go to; rank 0 alone spools them."""
    first_step: int
    """Above 0, the newest whole checkpoint at or before it is loaded."""
    checkpoint_root: Path
    checkpoints: Mapping[int, str]
    """Step -> manifest's SHA-256 of those that may be loaded: the controller was told of each when it was written."""
    log: Path
    """Where all that the rank prints goes."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank found out while it was built."""

    rank: RankFact
    environment: dict[str, Any]
    data_hash: str
    parameters: list[ParameterFact]
    momentum_unit: MomentumUnit
    initial_parameters_hash: str
    resolved_ds_config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerPoll:
    """One answer to a poll: a snapshot, of plain values."""

    phases: dict[Phase, float]
    step: int | None
    steps_done: int
    part: int
    records: int
    """Records in the spool, on rank 0; 0 elsewhere."""
    shipping_refused: str | None
    facts: RankFacts | None
    """Once, in the first poll after they are known."""

    @property
    def position(self) -> tuple[int, int, int]:
        """Grows with everything the rank achieves."""
        return len(self.phases), self.steps_done, self.part


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a rank ended."""

    failure: RankFailure | None
    final: FinalState | None
    phases: dict[Phase, float]
    first_step: int
    records: int
    facts: RankFacts | None = None
    """Of the attempt, again: a short one ends between two polls."""


@dataclass(slots=True)
class _State:
    """What polls read, each field replaced as a whole by the training thread."""

    phases: dict[Phase, float] = field(default_factory=dict)
    progress: Any = None
    spool: SpoolWriter | None = None
    facts: RankFacts | None = None
    facts_reported: bool = False


def serve(running: int, polling: int) -> None:
    """Live through one attempt; returns when the actor has the result and hangs up.

    Args:
        running: descriptor of the channel that carries surroundings and assignment here, the rank 0's port there, the
            meeting here and the result there.
        polling: descriptor of the channel on which each message is a poll, and is answered.
    """
    with Connection(running) as actor:
        surroundings: Surroundings = actor.recv()
        surroundings.take_over()
        assignment: Assignment = actor.recv()
        redirect_output(assignment.log)
        rank = Rank(assignment, surroundings)
        threading.Thread(target=_answer_polls, args=(Connection(polling), rank), name="polls", daemon=True).start()
        actor.send(rank.port)
        try:
            host, port = actor.recv()
            actor.send(rank.run(host, port))
            # The actor's end is the rank's: it alone hangs up.
            actor.recv()
        except EOFError:
            return


class Rank:
    """One rank's work. `poll` runs beside `run`."""

    def __init__(self, assignment: Assignment, surroundings: Surroundings) -> None:
        self._assignment, self._surroundings = assignment, surroundings
        self._state = _State()
        self._listener = socket.create_server((surroundings.host, 0), backlog=128) if assignment.rank == 0 else None
        self._imports = Background(_import_heavy)
        if assignment.rank == 0:
            self._spooling = Background(self._open_spool)

    @property
    def port(self) -> int:
        """Where rank 0 listens for the others; 0 elsewhere."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def poll(self) -> WorkerPoll:
        """Say how far this rank is; never waits for training."""
        state, progress = self._state, self._state.progress
        facts = None if state.facts_reported else state.facts
        state.facts_reported = facts is not None or state.facts_reported
        spool = state.spool
        return WorkerPoll(
            phases=self._phases(),
            step=None if progress is None else progress.step,
            steps_done=0 if progress is None else progress.steps_done,
            part=0 if progress is None else progress.part,
            records=0 if spool is None else spool.records,
            shipping_refused=None if spool is None else _refusal(spool.directory),
            facts=facts,
        )

    def run(self, host: str, port: int) -> RankResult:
        """Train the whole attempt; returns how it ended, training's own failures included.

        Args:
            host: rank 0's address.
            port: where rank 0 listens.
        """
        failure, final, first_step = None, None, self._assignment.first_step
        stage = FailureKind.SETUP_FAILED
        load = system_load.start(self._assignment.destination, self._assignment.rank)
        try:
            self._imports.wait()
            self._mark(Phase.IMPORTED)
            training, first_step, discarded_in_a_row = self._build(host, port)
            self._mark(Phase.INITIALIZED)
            stage = FailureKind.TASK_ERROR
            failure = self._train(training, first_step, discarded_in_a_row)
            final = _final_state(training)
        except SystemExit as error:
            # The task's code alone leaves a program; in another attempt it would again.
            failure = self._describe(error, FailureKind.TASK_ERROR)
        except Exception as error:
            failure = self._describe(error, stage)
        finally:
            load.stop()
        return self._ended(failure, final, first_step)

    def _build(self, host: str, port: int) -> tuple[Any, int, int]:
        """Return the training state, its first step, and how many discarded steps in a row came before it."""
        import torch
        import torch.distributed as dist

        from workers import checkpoint
        from workers.engine import Place, build_training, join_process_group, runs_on_gpu

        spec, rank = self._assignment.spec, self._assignment.rank
        if not torch.cuda.is_available():
            # Imported beforehand by the fork server, torch did not see this process's variable.
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # The listening socket is handed over: nobody can take the port between choosing and using it.
        listener = self._listener.detach() if self._listener is not None else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, spec.world_size, is_master=rank == 0, master_listen_fd=listener
        )
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        use_card_of(self._surroundings.host)
        place = Place(rank, spec.world_size)
        join_process_group(store, place)
        training = build_training(spec, place)
        first_step = discarded_in_a_row = 0
        if self._assignment.first_step > 0:
            first_step, discarded_in_a_row = checkpoint.load_newest(
                training, self._assignment.checkpoint_root, self._assignment.first_step, self._assignment.checkpoints
            )
        if rank == 0:
            self._state.spool = self._spooling.wait()
        device_ids = self._surroundings.device_ids if runs_on_gpu() else []
        self._state.facts = _rank_facts(training, device_ids)
        return training, first_step, discarded_in_a_row

    def _train(self, training: Any, first_step: int, discarded_in_a_row: int) -> RankFailure | None:
        """Run the loop; a death that the numbers explain is returned, for all ranks die it at the same step."""
        from workers import checkpoint
        from workers.train_loop import LoopHooks, Progress, train

        progress = Progress(discarded_in_a_row=discarded_in_a_row)
        every, root = training.spec.checkpoint.every_steps, self._assignment.checkpoint_root

        def is_due(steps: int) -> bool:
            return every is not None and steps % every == 0

        def after_step(steps: int) -> None:
            if is_due(steps):
                checkpoint.save(training, root, steps, progress.discarded_in_a_row)

        spool = self._state.spool
        record = spool.append if spool is not None else lambda _: None
        self._state.progress = progress
        try:
            train(training, first_step, progress, LoopHooks(record, after_step, is_due))
        except Exception as error:
            failure = self._describe(error, FailureKind.TASK_ERROR)
            if failure.failure.kind not in VERDICT_BEARING:
                raise
            return failure
        return None

    def _describe(self, error: Exception | SystemExit, default: FailureKind) -> RankFailure:
        progress = self._state.progress
        return describe(
            error, rank=self._assignment.rank, step=None if progress is None else progress.step, default=default
        )

    def _ended(self, failure: RankFailure | None, final: FinalState | None, first_step: int) -> RankResult:
        spool = self._state.spool
        if spool is not None:
            spool.close()
        records = 0 if spool is None else spool.records
        return RankResult(failure, final, self._phases(), first_step, records, self._state.facts)

    def _phases(self) -> dict[Phase, float]:
        progress = self._state.progress
        if progress is None or progress.first_step_at is None:
            return dict(self._state.phases)
        return {
            **self._state.phases,
            Phase.FIRST_STEP: progress.first_step_at,
            Phase.LAST_STEP: progress.last_step_at,
        }

    def _mark(self, phase: Phase) -> None:
        self._state.phases = {**self._state.phases, phase: time.time()}

    def _open_spool(self) -> SpoolWriter:
        destination = self._assignment.destination
        sweep_spools(destination.attempt_id)
        writer = SpoolWriter(spool_directory(destination.attempt_id), destination)
        threading.Thread(target=_keep_shipping, args=(writer.directory,), name="shipper-keeper", daemon=True).start()
        return writer


def _import_heavy() -> None:
    prepare_environment()
    import torch  # noqa: F401

    keep_compiler_unloaded()
    remove_left_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    import workers.train_loop  # noqa: F401


def _keep_shipping(directory: Path) -> None:
    """Start the shipper, and another one whenever it has died."""
    while directory.exists():
        if _refusal(directory) is not None:
            return
        try:
            if not is_shipper_alive(directory):
                start_detached(directory)
        except (OSError, subprocess.SubprocessError) as error:
            # No room for its log, or no process to be had: the records wait, and there may be both in a moment.
            logger.warning("no shipper was started: %s", error, extra={"action": "shipper_not_started"})
        time.sleep(SHIPPER_CHECK_S)


def _refusal(directory: Path) -> str | None:
    """Return why the controller will take no more of a spool, if it said so and that can be read now."""
    try:
        return Shipped.read(directory).refused
    except OSError:
        return None


def _answer_polls(polling: Connection, rank: Rank) -> None:
    try:
        while True:
            polling.recv_bytes()
            polling.send(rank.poll())
    except (EOFError, OSError):
        # The actor is gone, and with it whoever would have a use for this process.
        os._exit(1)


def _rank_facts(training: Any, device_ids: list[str]) -> RankFacts:
    from workers.engine import describe_environment, device_name

    rank = RankFact(
        rank=training.place.rank,
        node=socket.gethostname(),
        pid=os.getpid(),
        device=device_name(training.engine.device),
        device_id=",".join(device_ids) or None,
        local_rank=0,
    )
    return RankFacts(
        rank=rank,
        environment=_plain(describe_environment(training)),
        data_hash=training.data_hash,
        parameters=training.routes,
        momentum_unit=training.momentum_unit,
        initial_parameters_hash=training.initial_parameters_hash,
        resolved_ds_config=_plain(training.engine.config),
    )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Reduce to JSON's own types: a string type of torch's would make the driver import torch to read it."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def _final_state(training: Any) -> FinalState:
    from workers.final_state import hash_parameters, peak_memory_bytes

    compared = training.initial.compare(training.muon_indices, training.probe_group)
    final_hash = hash_parameters(training.parameters, is_first=training.place.rank == 0)
    peak = peak_memory_bytes(training.engine.device)
    return FinalState(**{**dict(compared), "final_parameters_hash": final_hash, "peak_memory_bytes": peak})
