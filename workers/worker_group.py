"""The worker group: one placement group, one actor a rank, their meeting, and when it is over.

What happens and what follows from it are kept apart: `WorkerGroup` talks to Ray and gathers `RankState`s, `decide`
turns those into a decision without touching anything. A poll never waits: a rank that does not answer keeps its
unanswered poll, and how long that has been is what names it when the group stalls.
"""

import os
import pickle
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from muonscope.contract.attempts import Failure
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind
from workers.errors import ReleaseUnavailable, WorkerDied, WorkerStalled
from workers.failure import RankFailure, describe, root_cause
from workers.rank import Assignment, RankFacts, RankResult, WorkerPoll
from workers.releases import Preparation, import_path, is_installed_already
from workers.train_worker import Address, RankEnd, TrainWorker

# An answer older than this is silence.
SILENT_AFTER_S: Final = 3.0
# Before its first step a group imports, meets, compiles and loads: there the stall limit is at least this.
SETUP_LIMIT_S: Final = 300.0
# After the first rank ended, how long the others may take to say why they did.
LAST_WORDS_S: Final = 2.0


@dataclass(slots=True)
class RankState:
    """What is known of one rank. Times are the driver's monotonic clock."""

    rank: int
    answered_at: float
    moved_at: float
    poll: WorkerPoll | None = None
    result: RankResult | None = None
    failure: RankFailure | None = None
    ended_at: float | None = None

    def answer(self, poll: WorkerPoll, now: float) -> None:
        """Take in an answered poll."""
        self.answered_at = now
        if self.poll is None or poll.position != self.poll.position:
            self.moved_at = now
        self.poll = poll

    def end(self, now: float, result: RankResult | None = None, failure: RankFailure | None = None) -> None:
        """Take in that the rank is over: with a result, or with what killed it."""
        self.ended_at = now
        self.result = result
        self.failure = failure if result is None else result.failure


@dataclass(frozen=True, slots=True)
class GoOn:
    """Nothing to do but poll again."""

    silent_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Every rank ended well."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt is over."""

    failure: Failure


Decision = GoOn | Finished | Failed


def decide(ranks: Sequence[RankState], now: float, stall_limit_s: float) -> Decision:
    """Say what the ranks' states mean.

    A failure ends the group once all ranks ended or the others had time for last words: the first to notice is often
    not the one that broke. Without a failure, no movement of any rank within `stall_limit_s` ends it.
    """
    failures = {state.rank: state.failure for state in ranks if state.failure is not None}
    if failures:
        first_ended_at = min(state.ended_at for state in ranks if state.ended_at is not None)
        if all(state.ended_at is not None for state in ranks) or now - first_ended_at >= LAST_WORDS_S:
            return Failed(root_cause(failures))
        return GoOn(silent_ranks(ranks, now))
    if all(state.ended_at is not None for state in ranks):
        return Finished()
    last_movement = max(max(state.moved_at, state.ended_at or 0.0) for state in ranks)
    is_training = any(state.poll is not None and state.poll.steps_done > 0 for state in ranks)
    limit_s = stall_limit_s if is_training else max(stall_limit_s, SETUP_LIMIT_S)
    if now - last_movement > limit_s:
        stall = WorkerStalled(suspects(ranks, now), last_step(ranks), now - last_movement, limit_s)
        rank = stall.silent_ranks[0] if len(stall.silent_ranks) == 1 else None
        return Failed(Failure(kind=FailureKind.WORKER_STALLED, rank=rank, step=stall.step, message=str(stall)))
    return GoOn(silent_ranks(ranks, now))


def silent_ranks(ranks: Sequence[RankState], now: float) -> tuple[int, ...]:
    """Return the ranks whose last answer is too old: their process does not run."""
    return tuple(state.rank for state in ranks if state.ended_at is None and now - state.answered_at > SILENT_AFTER_S)


def suspects(ranks: Sequence[RankState], now: float) -> tuple[int, ...]:
    """Return the ranks that hold a stalled group up: the silent ones, else those that got least far.

    A rank that waits in a collective still answers, and its peers wait in front of the one that never came.
    """
    silent = silent_ranks(ranks, now)
    running = [state for state in ranks if state.ended_at is None and state.poll is not None]
    if silent or not running:
        return silent or tuple(state.rank for state in ranks if state.ended_at is None)
    least = min(state.poll.position for state in running if state.poll is not None)
    return tuple(state.rank for state in running if state.poll is not None and state.poll.position == least)


def last_step(ranks: Sequence[RankState]) -> int | None:
    """Return the newest step that any rank completed, counting from the attempt's first; None before it."""
    steps = [state.poll.step for state in ranks if state.poll is not None and state.poll.step is not None]
    return max(steps) if steps else None


@dataclass(slots=True)
class _Member:
    state: RankState
    actor: Any = None
    run: Any = None
    waiting: Any = None
    address: Address | None = None
    facts: RankFacts | None = field(default=None)


class WorkerGroup:
    """The actors of one attempt. Start it, poll it, kill it; never reuse it."""

    def __init__(self, assignments: Sequence[Assignment], now: float, releases: Path) -> None:
        """Ask Ray for the actors; returns without waiting for them.

        Args:
            assignments: one a rank, in rank order.
            now: the driver's monotonic clock.
            releases: where DeepSpeed releases are kept that are not the installed one.
        """
        resources = assignments[0].spec.resources
        bundle: dict[str, float] = {"GPU": resources.gpus_per_rank}
        if resources.memory_bytes is not None:
            bundle["memory"] = float(resources.memory_bytes)
        # Not detached: with the job's end, however it comes, Ray takes the group back.
        self._placement: PlacementGroup = placement_group([bundle] * len(assignments), strategy="PACK")
        self._assignments = assignments
        self._members = [_Member(RankState(each.rank, answered_at=now, moved_at=now)) for each in assignments]
        self._addresses: list[Any] = []
        self._preparation = _preparation(assignments[0].spec, releases)
        if self._preparation is None:
            self._ask_for_actors()
        self.started_at: float | None = None
        """Unix time at which every rank's process had answered."""

    @property
    def ranks(self) -> list[RankState]:
        return [member.state for member in self._members]

    @property
    def facts(self) -> list[RankFacts | None]:
        """By rank, what each found out while it was built; None before."""
        return [member.facts for member in self._members]

    @property
    def node_ids(self) -> list[str]:
        """The node of each rank that has started."""
        return [member.address.node_id for member in self._members if member.address is not None]

    @property
    def first_address(self) -> Address | None:
        """Where rank 0 runs; None before the group has met."""
        return self._members[0].address

    def poll(self, now: float, wait_s: float) -> list[RankState]:
        """Bring the ranks' states up to date, after at most `wait_s`.

        Returns at once when a rank ends.
        """
        if self.started_at is None:
            self._try_to_start(now, wait_s)
            return self.ranks
        for member in self._members:
            if member.waiting is None and member.state.ended_at is None:
                member.waiting = member.actor.poll.options(concurrency_group="control").remote()
        runs = [member.run for member in self._members if member.state.ended_at is None]
        if runs:
            ray.wait(runs, num_returns=1, timeout=wait_s)
        for member in self._members:
            self._take_answer(member, now)
            self._take_end(member, now)
        return self.ranks

    def kill(self) -> None:
        """End every actor at once; their devices are free when this returns, or a moment later on other nodes."""
        if self._preparation is not None:
            self._preparation.cancel()
        for member in self._members:
            self._kill_here(member)
            if member.actor is not None:
                ray.kill(member.actor, no_restart=True)
        remove_placement_group(self._placement)

    def _ask_for_actors(self, environment: Mapping[str, str] | None = None) -> None:
        """Ask Ray for every rank's actor, with these variables before it starts."""
        resources = self._assignments[0].spec.resources
        worker_type = ray.remote(concurrency_groups={"control": 2})(TrainWorker)
        for member, assignment in zip(self._members, self._assignments, strict=True):
            member.actor = worker_type.options(
                num_cpus=0,
                num_gpus=resources.gpus_per_rank,
                memory=resources.memory_bytes,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, assignment.rank),
                enable_task_events=False,
                # Without any, an actor may take a worker that Ray keeps warm.
                **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
            ).remote(pickle.dumps(assignment), assignment.rank, len(self._assignments), resources.gpus_per_rank)
        self._addresses = [
            member.actor.address.options(concurrency_group="control").remote() for member in self._members
        ]

    def _is_prepared(self, now: float, wait_s: float) -> bool:
        """Ask for the actors once the run's DeepSpeed release is on the nodes; says whether that is done."""
        assert self._preparation is not None
        for state in self.ranks:
            # Installing has a limit of its own, and is nobody's silence.
            state.answered_at = state.moved_at = now
        try:
            folder = self._preparation.poll(wait_s)
        except ReleaseUnavailable as error:
            failure = RankFailure(Failure(kind=FailureKind.SETUP_FAILED, message=str(error)))
            for state in self.ranks:
                state.end(now, failure=failure)
            return False
        if folder is None:
            return False
        self._ask_for_actors({"PYTHONPATH": import_path(folder)})
        return True

    def _try_to_start(self, now: float, wait_s: float) -> None:
        if not self._addresses and not self._is_prepared(now, wait_s):
            return
        ready, _ = ray.wait(self._addresses, num_returns=len(self._addresses), timeout=wait_s)
        if len(ready) < len(self._members):
            self._note_deaths_before_start(ready, now)
            return
        self._note_deaths_before_start(ready, now)
        if any(state.failure is not None for state in self.ranks):
            return
        for member, reference in zip(self._members, self._addresses, strict=True):
            member.address = ray.get(reference)
        meeting = self._members[0].address
        assert meeting is not None
        for member in self._members:
            member.state.answered_at = member.state.moved_at = now
            member.run = member.actor.run.remote(meeting.host, meeting.port)
        self.started_at = time.time()

    def _note_deaths_before_start(self, ready: Sequence[Any], now: float) -> None:
        for member, reference in zip(self._members, self._addresses, strict=True):
            if reference in ready and member.state.ended_at is None:
                try:
                    ray.get(reference)
                except RayError as error:
                    member.state.end(now, failure=_death(member.state.rank, error))

    def _take_answer(self, member: _Member, now: float) -> None:
        if member.waiting is None or not ray.wait([member.waiting], timeout=0)[0]:
            return
        try:
            answer: bytes | None = ray.get(member.waiting)
        except RayError:
            answer = None
        member.waiting = None
        if answer is None:
            # Its run says why.
            return
        poll: WorkerPoll = pickle.loads(answer)
        member.state.answer(poll, now)
        member.facts = poll.facts or member.facts

    def _take_end(self, member: _Member, now: float) -> None:
        if member.state.ended_at is not None or not ray.wait([member.run], timeout=0)[0]:
            return
        try:
            end: RankEnd = ray.get(member.run)
        except RayError as error:
            member.state.end(now, failure=_death(member.state.rank, error))
            return
        if end.result is None:
            rank = member.state.rank
            member.state.end(now, failure=describe(WorkerDied(rank, str(end.death)), rank=rank, step=None))
        else:
            result: RankResult = pickle.loads(end.result)
            member.facts = member.facts or result.facts
            member.state.end(now, result=result)

    def _kill_here(self, member: _Member) -> None:
        """Kill a rank of this very node by its process ids: neither a stopped process nor Ray's queues delay that."""
        address = member.address
        if address is None or address.node_id != ray.get_runtime_context().get_node_id():
            return
        for pid in (address.pid, address.actor_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _preparation(spec: RunSpec, releases: Path) -> Preparation | None:
    """Start installing the release that a run asks for; None where the nodes have it as their own."""
    if spec.deepspeed is None or is_installed_already(spec.deepspeed.version):
        return None
    return Preparation(releases, spec.deepspeed.version)


def _death(rank: int, error: RayError) -> RankFailure:
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        # Raised inside the actor, outside what `run` translates.
        return describe(error, rank=rank, step=None, default=FailureKind.SETUP_FAILED)
    return describe(WorkerDied(rank, str(error).strip().splitlines()[-1]), rank=rank, step=None)
