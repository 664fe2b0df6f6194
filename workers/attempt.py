"""One enrolled attempt: start the group, watch it, settle the record, report the outcome.

The main thread watches the group and speaks no HTTP while training goes on; the reporter's thread speaks HTTP and
never touches Ray: a controller that is away delays nothing but its own news.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from muonscope.contract.attempts import (
    AttemptOutcome,
    CheckpointFact,
    CheckpointReport,
    Enrolled,
    Failure,
    Heartbeat,
)
from muonscope.contract.status import AttemptStatus, FailureKind, Phase
from workers import checkpoint_files, warm_pool
from workers.controller_client import ControllerClient
from workers.errors import ControllerAway, ControllerRefused
from workers.failure import MAX_MESSAGE, VERDICT_BEARING
from workers.logs import LogShipper, log_folder, rank_log
from workers.rank import Assignment, RankFacts
from workers.releases import releases_root
from workers.reporter import Reporter
from workers.shipper import Settled, settle
from workers.spool import Destination, remove_spool, spool_directory
from workers.worker_group import Failed, Finished, RankState, WorkerGroup, decide

POLL_S: Final = 0.1
# How often the driver looks which checkpoints are complete.
CHECKPOINTS_S: Final = 0.5
# How long an ended attempt may take to ship the rest of its logs.
LOGS_PATIENCE_S: Final = 2.0
# A stop leaves within three seconds, its last news delivered or not.
STOP_PATIENCE_S: Final = 1.0

EXIT_SUCCEEDED: Final = 0
EXIT_FAILED: Final = 1
EXIT_VERDICT: Final = 3
EXIT_STOPPED: Final = 130

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the group came to its end."""

    status: AttemptStatus
    failure: Failure | None = None

    @property
    def exit_code(self) -> int:
        if self.failure is not None:
            return EXIT_VERDICT if self.failure.kind in VERDICT_BEARING else EXIT_FAILED
        return EXIT_STOPPED if self.status is AttemptStatus.STOPPED else EXIT_SUCCEEDED


class Attempt:
    """Lives through one attempt."""

    def __init__(
        self, controller: str, attempt_id: str, enrolled: Enrolled, home: Path, stop: threading.Event, patience_s: float
    ) -> None:
        self._attempt_id, self._enrolled = attempt_id, enrolled
        self._stop, self._patience_s = stop, patience_s
        self._checkpoint_root = home / "checkpoints" / enrolled.run_id
        self._checkpoints_seen_at = float("-inf")
        self._log_folder = log_folder(home, attempt_id)
        self._logs = LogShipper(
            self._log_folder, enrolled.spec.world_size, ControllerClient(controller, attempt_id, enrolled.token)
        )
        self._releases = releases_root(home)
        self._destination = Destination(controller, attempt_id, enrolled.token, enrolled.epoch)
        self._reporter = Reporter(ControllerClient(controller, attempt_id, enrolled.token), enrolled.heartbeat_s)

    def run(self, *, driver_started_at: float, enrolled_at: float) -> int:
        """Train, settle, report; returns the exit code."""
        self._reporter.tell({Phase.DRIVER_STARTED: driver_started_at, Phase.ENROLLED: enrolled_at})
        group = WorkerGroup(self._assignments(), time.monotonic(), self._releases)
        self._reporter.start()
        self._logs.start()
        try:
            ending = self._watch(group)
        except Exception as error:
            logger.exception("the group cannot be watched", extra={"action": "watch_failed"})
            failure = Failure(kind=FailureKind.SETUP_FAILED, message=f"{type(error).__name__}: {error}"[:MAX_MESSAGE])
            ending = Ending(AttemptStatus.FAILED, failure)
        finally:
            group.kill()
        if ending is None:
            logger.error("a newer attempt owns the run", extra={"action": "superseded"})
            self._forget_spool(group)
            return EXIT_FAILED
        self._tell(group)
        self._tell_checkpoints(float("inf"))
        self._reporter.tell({Phase.FINISHED: time.time()})
        code = self._report(group, ending)
        # After the outcome: the controller need not wait for the next attempt's comfort.
        warm_pool.refill(group.node_ids)
        return code

    def _assignments(self) -> list[Assignment]:
        spec, first_step = self._enrolled.spec, self._enrolled.resume_step
        known = {fact.step: fact.manifest_sha256 for fact in self._enrolled.checkpoints}
        return [
            Assignment(
                spec, rank, self._destination, first_step, self._checkpoint_root, known,
                rank_log(self._log_folder, rank),
            )
            for rank in range(spec.world_size)
        ]  # fmt: skip

    def _watch(self, group: WorkerGroup) -> Ending | None:
        """Poll the group until it is over; None when a newer attempt owns the run."""
        while True:
            ranks = group.poll(time.monotonic(), POLL_S)
            if self._reporter.superseded.is_set():
                return None
            if self._stop.is_set() or self._reporter.stop_requested.is_set():
                logger.info("stopping", extra={"action": "stop"})
                return Ending(AttemptStatus.STOPPED)
            decision = decide(ranks, time.monotonic(), self._enrolled.stall_limit_s)
            if isinstance(decision, Finished):
                return Ending(AttemptStatus.SUCCEEDED)
            if isinstance(decision, Failed):
                failure = decision.failure
                logger.error("%s: %s", failure.kind, failure.message, extra={"action": "attempt_failed"})
                return Ending(AttemptStatus.FAILED, failure)
            self._tell(group, decision.silent_ranks)
            self._tell_checkpoints(time.monotonic())

    def _tell(self, group: WorkerGroup, silent_ranks: Sequence[int] = ()) -> None:
        """Hand the reporter what is new about the group."""
        if group.started_at is None:
            return
        self._reporter.tell(
            {Phase.WORKERS_STARTED: group.started_at, **group_phases(group.ranks)}, **group_facts(group.facts)
        )
        poll = group.ranks[0].poll
        self._reporter.beat(
            Heartbeat(
                status=AttemptStatus.RUNNING,
                steps_recorded=0 if poll is None else poll.records,
                silent_ranks=list(silent_ranks),
            )
        )

    def _tell_checkpoints(self, now: float) -> None:
        """Hand the reporter which checkpoints are complete, if it is time to look again.

        The folder is what counts, not what a rank says of it: one that dies right after the rename reports nothing.
        """
        if self._enrolled.spec.checkpoint.every_steps is None or now - self._checkpoints_seen_at < CHECKPOINTS_S:
            return
        self._checkpoints_seen_at = now
        found = checkpoint_files.look(self._checkpoint_root)
        self._reporter.tell_checkpoints(
            CheckpointReport(
                checkpoints=tuple(
                    CheckpointFact(step=one.step, total_bytes=one.total_bytes, manifest_sha256=one.manifest_sha256)
                    for one in found
                )
            )
        )

    def _report(self, group: WorkerGroup, ending: Ending) -> int:
        is_stop = ending.status is AttemptStatus.STOPPED
        patience_s = STOP_PATIENCE_S if is_stop else self._patience_s
        # Its own event for a stop: the one that is set already must not cut the last news short.
        give_up = threading.Event() if is_stop else self._stop
        settled = self._settle(group, patience_s, give_up)
        # Before the outcome, which closes the attempt's record.
        self._logs.finish(min(patience_s, LOGS_PATIENCE_S))
        if settled.refused is not None and ending.failure is None and not is_stop:
            failure = Failure(kind=FailureKind.RECORD_INCOMPLETE, message=settled.refused)
            ending = Ending(AttemptStatus.FAILED, failure)
        result = group.ranks[0].result
        outcome = AttemptOutcome(
            status=ending.status,
            first_step=self._enrolled.resume_step if result is None else result.first_step,
            declared_steps=settled.declared,
            failure=ending.failure,
            final=None if result is None else result.final,
        )
        try:
            self._reporter.finish(outcome, patience_s, give_up)
        except (ControllerAway, ControllerRefused) as error:
            logger.error("the outcome was not delivered: %s", error, extra={"action": "outcome_undelivered"})
            return ending.exit_code or EXIT_FAILED
        if settled.is_complete:
            self._forget_spool(group)
        return ending.exit_code

    def _forget_spool(self, group: WorkerGroup) -> None:
        """Remove the spool if it is on this node; on another one, its shipper does."""
        if self._is_here(group):
            remove_spool(spool_directory(self._attempt_id))

    def _settle(self, group: WorkerGroup, patience_s: float, give_up: threading.Event) -> Settled:
        """Ship what is left in rank 0's spool, on the node that holds it."""
        if self._is_here(group):
            return settle(spool_directory(self._attempt_id), patience_s, give_up)
        address = group.first_address
        assert address is not None
        remote = ray.remote(settle_there).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(address.node_id, soft=False)
        )
        try:
            settled: Settled = ray.get(remote.remote(self._attempt_id, patience_s), timeout=patience_s + 60)
        except ray.exceptions.RayError as error:
            return Settled(declared=0, shipped=0, refused=f"the spool's node is gone: {error}")
        return settled

    def _is_here(self, group: WorkerGroup) -> bool:
        address = group.first_address
        return address is None or address.node_id == ray.get_runtime_context().get_node_id()


def settle_there(attempt_id: str, patience_s: float) -> Settled:
    """Settle an attempt's spool on this node, wherever this node keeps it."""
    return settle(spool_directory(attempt_id), patience_s)


def group_phases(ranks: Sequence[RankState]) -> dict[Phase, float]:
    """Return when each phase ended for the last rank; a phase that not all ranks reached is left out."""
    known = [
        rank.result.phases if rank.result is not None else rank.poll.phases if rank.poll is not None else {}
        for rank in ranks
    ]
    reached = set.intersection(*(set(phases) for phases in known)) if known else set()
    return {phase: max(phases[phase] for phases in known) for phase in Phase if phase in reached}


def group_facts(facts: Sequence[RankFacts | None]) -> dict[str, Any]:
    """Return the ranks' facts as AttemptFacts' fields, once every rank has told its own."""
    known = [fact for fact in facts if fact is not None]
    if not known or len(known) < len(facts):
        return {}
    first = known[0]
    return {
        "parameters": first.parameters,
        "ranks": [fact.rank for fact in known],
        "momentum_unit": first.momentum_unit,
        "data_hash": hashlib.sha256("".join(fact.data_hash for fact in known).encode()).hexdigest(),
        "initial_parameters_hash": first.initial_parameters_hash,
        "environment": first.environment,
        "resolved_ds_config": first.resolved_ds_config,
    }
