"""The controller's loop: observe Ray, decide in one transaction, act. One tick at a time, woken by every change.

    observe   which attempts are live; how their jobs stand; what the cluster has     (HTTP, no transaction)
    decide    reconcile, then schedule, as pure functions; write what they say        (one transaction)
    act       submit and stop jobs, send alerts                                       (HTTP, after the commit)

A crash between commit and act leaves an attempt without a job, which the next tick finds and closes as lost; a crash
after it leaves a job with an attempt, which the next tick adopts. Nothing is ever submitted without a row.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from muonscope.contract.attempts import Failure
from muonscope.contract.status import FailureKind, RunStatus
from service.controller import transitions
from service.controller.alerts import Deliverer, Evaluator, Message
from service.controller.launcher import (
    ClusterResources,
    Job,
    JobRefused,
    JobRequest,
    Launcher,
    LauncherStarting,
    LauncherUnavailable,
    describe,
)
from service.controller.leadership import Leadership, NotLeading
from service.controller.plan import Plan, Planner, Situation
from service.controller.reconcile import find_orphans
from service.controller.retry_policy import RetryPolicy, retry_reason
from service.errors import Unavailable
from service.settings import Settings
from service.store.attempts import AttemptRepository
from service.store.session import Database, Session
from service.store.types import read_clock
from service.webhooks import Sender

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 10.0
_RESOURCES_S: Final = 2.0
_STOP_AGAIN_S: Final = 2.0
# Ray keeps a record of every job for ever; ours hold nothing that the store does not.
_PRUNE_S: Final = 600.0
_KEPT_JOBS: Final = 100
_STALE_TICK_S: Final = 15.0
_STAND_BY_S: Final = 0.2
_LONGEST_REST_S: Final = 0.5
_HEAVY_TICK_S: Final = 0.03
# Ray's count of used GPUs is this old at most; GPUs that a run of ours gave back are not taken for another's.
_USAGE_LAG_S: Final = 8.0


@dataclass(slots=True)
class _Memory:
    """What the loop knows that no row says; losing it in a crash costs a tick, never a run."""

    submitting: set[str] = field(default_factory=set)
    submitted_at: dict[str, float] = field(default_factory=dict)
    """On the monotonic clock, until an observation begun later has shown the job."""
    refusals: dict[str, Failure] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Unix seconds at which jobs were submitted, not yet in their rows."""
    stop_seen: dict[str, float] = field(default_factory=dict)
    stop_sent: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    released: list[tuple[float, float]] = field(default_factory=list)
    """(monotonic time, GPUs) of attempts that ended lately."""
    suspects: frozenset[str] = frozenset()


class ControllerLoop:
    """Runs the queue. Satisfies the api's `Controller` protocol."""

    def __init__(
        self,
        database: Database,
        launcher: Launcher,
        settings: Settings,
        *,
        owner: str,
        leadership: Leadership | None = None,
        on_change: Callable[[], None] = lambda: None,
        expected_gpus: float | None = None,
        gpus_are_logical: bool | None = None,
        sender: Sender | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            database: migrated.
            launcher: where jobs run.
            settings: ours.
            owner: names this store to Ray, so that two services on one cluster leave each other's jobs alone.
            leadership: whether this controller leads, where several may share the store; None always does.
            on_change: called, thread-safe, after a tick that changed rows.
            expected_gpus: what the cluster will have, where that is known before Ray is reached.
            gpus_are_logical: whether its GPUs are names for places on CPUs; None where nobody says.
            sender: sends webhooks; None is a plain one.
            clock: monotonic seconds.
        """
        self._database = database
        self._launcher = launcher
        self._settings = settings
        self._owner = owner
        self._leadership = leadership
        self._on_change = on_change
        self._expected_gpus = expected_gpus
        self._gpus_are_logical = gpus_are_logical
        self._clock = clock
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_backoff_s)
        self._planner = Planner(settings, self._policy, clock)
        self._evaluator = Evaluator()
        self._deliverer = Deliverer(database, settings, leadership=leadership, sender=sender)
        self._led_since = float("-inf")
        self._memory = _Memory()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._resources: ClusterResources | None = None
        self._resources_at = float("-inf")
        self._swept_at = float("-inf")
        self._pruned_at = float("-inf")
        self._ticked_at = float("-inf")
        self._clock_lead: float | None = None
        self._is_prepared = False
        self._is_idle = False
        self._is_filling = False
        self._problem: str | None = "Ray has not been reached yet"
        self._failure: str | None = None
        self._closed: str | None = None

    # -- what the api asks -------------------------------------------------------------------------------------------

    @property
    def legal(self) -> Mapping[RunStatus, Collection[RunStatus]]:
        return transitions.LEGAL

    @property
    def problems(self) -> list[str]:
        if (standing_by := self.standing_by) is not None:
            return [standing_by]
        found = [text for text in (self._problem, self._failure) if text]
        if self._task is not None and self._clock() - self._ticked_at > _STALE_TICK_S and not found:
            found.append(f"the controller's loop has not ticked for more than {_STALE_TICK_S:g} s")
        return found

    @property
    def standing_by(self) -> str | None:
        """Why another controller, not this one, takes what is written; None while this one leads."""
        return self._leadership.problem if self._leadership is not None else None

    def wake(self) -> None:
        loop = self._event_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake.set)

    def retry_reason(self, failure: Failure | None, attempts: int) -> str | None:
        return retry_reason(failure, attempts, self._policy)

    async def job_logs(self, submission_id: str) -> str | None:
        try:
            return await self._launcher.logs(submission_id)
        except LauncherUnavailable as error:
            raise Unavailable(str(error), remedy="try again once Ray is reachable") from error

    def total_gpus(self) -> float | None:
        return self._resources.gpus if self._resources is not None else self._expected_gpus

    def most_gpus(self) -> float | None:
        total = self.total_gpus()
        is_local = self._expected_gpus is not None
        # A cluster of no worker yet says nothing of what it will be; on this machine nothing more will come.
        if total is None or (total == 0 and not is_local):
            return None if self._settings.cluster_max_gpus is None or is_local else self._settings.cluster_max_gpus
        return total if is_local else max(total, self._settings.cluster_max_gpus or 0.0)

    def cluster(self) -> dict[str, Any]:
        resources = self._resources or ClusterResources()
        return {
            "address": self._launcher.description,
            "reachable": self._problem is None,
            "problem": self._problem,
            "gpus": resources.gpus,
            "gpus_are_logical": self._gpus_are_logical,
            "nodes": describe(resources),
        }

    def has_live_attempts(self) -> bool:
        """Whether attempts are live by their rows. Blocks."""
        return bool(self._live_submission_ids())

    def has_wanted_attempts(self) -> bool:
        """Whether attempts are live that nobody has asked to end. Blocks."""
        with self._database.read() as session:
            return AttemptRepository(session).has_wanted_jobs()

    def close(self, why: str) -> None:
        """Start nothing more in this process; what is live goes on. Thread-safe."""
        self._closed = why
        self.wake()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin ticking on the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="controller")

    async def stop(self) -> None:
        """End after the tick that is running; submissions on their way are waited for. Jobs go on."""
        self._end.set()
        self._wake.set()
        if self._task is not None:
            # A forced end cancels every task at once, and the rest of the clean-up must still be done.
            with suppress(asyncio.CancelledError):
                await self._task
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        await self._launcher.close()

    async def settle(self) -> None:
        """Wait until what the last tick sent to Ray has been answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self) -> None:
        while not self._end.is_set():
            self._wake.clear()
            if self.standing_by is not None:
                # Whatever was known is another's to know by the time this one leads.
                self._memory, self._ticked_at = _Memory(), float("-inf")
                self._led_since = float("-inf")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), timeout=_STAND_BY_S)
                continue
            began = self._clock()
            try:
                await self.tick()
                self._failure = None
            except NotLeading as error:
                logger.warning("this controller leads no more: %s", error, extra={"action": "lead_lost"})
                continue
            except Exception as error:
                # Whatever it was (a locked database, a bug), the next tick starts from rows and Ray again.
                self._failure = f"the controller's last tick failed: {type(error).__name__}"
                logger.exception("a tick failed", extra={"action": "tick_failed"})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), timeout=self._rest_s(self._clock() - began))
            try:
                pause = self._settings.tick_s * (5 if self._is_idle else 1)
                await asyncio.wait_for(self._wake.wait(), timeout=pause)
            except TimeoutError:
                continue
            if self._failure is not None:
                await asyncio.sleep(min(self._settings.tick_s, 1.0))

    def _rest_s(self, taken_s: float) -> float:
        """How long to leave the store to others: a burst of submissions, each of which wakes the loop, waits for ticks.

        A long line makes a tick long; one that started nothing finds little to start in the next moment either.
        """
        if self._is_filling:
            return min(taken_s, _LONGEST_REST_S)
        is_heavy = taken_s > _HEAVY_TICK_S
        return min(taken_s * (10 if is_heavy else 4), _LONGEST_REST_S * (2 if is_heavy else 1))

    async def tick(self) -> None:
        """Observe, decide, act, once. Never called while another tick runs."""
        began = self._clock()
        situation = await self._observe(began)
        plan = await asyncio.to_thread(self._decide, situation)
        self._act(plan)
        self._remember(plan, situation, began)
        if plan.is_unfinished:
            self._wake.set()
        if plan.changed:
            self._on_change()
        for message in await asyncio.to_thread(self._deliverer.due):
            self._spawn(self._deliver(message))
        self._ticked_at = self._clock()

    # -- observe -----------------------------------------------------------------------------------------------------

    async def _observe(self, now: float) -> Situation:
        memory = self._memory
        # Whom to ask Ray about. While it answers attempts end and leases are extended: what is decided of them, `plan`
        # reads again in its transaction. The list is not kept from one tick to the next: a job that is missing from
        # what Ray was asked about counts as gone.
        live = await asyncio.to_thread(self._live_submission_ids)
        in_flight = frozenset(memory.submitting)
        jobs: Mapping[str, Job] | None
        orphans: frozenset[str] = frozenset()
        try:
            jobs = await self._launcher.jobs([name for name in live if name not in in_flight])
            if now - self._resources_at > _RESOURCES_S or self._resources is None:
                self._resources = await self._launcher.resources()
                self._resources_at = now
            if now - self._swept_at > _SWEEP_S:
                orphans = await self._sweep(live, now)
            await self._ease(live, now)
            self._note_reachable()
        except LauncherUnavailable as error:
            if self._problem != str(error):
                level = logging.INFO if isinstance(error, LauncherStarting) else logging.WARNING
                logger.log(level, "Ray is not reachable: %s", error, extra={"action": "ray_unreachable"})
            # A cluster that comes back may be another one.
            self._problem, jobs, self._is_prepared = str(error), None, False
        self._forget_submitted(now)
        return Situation(
            jobs=jobs,
            in_flight=in_flight | frozenset(memory.submitted_at),
            refusals=dict(memory.refusals),
            overdue_stops=frozenset(
                name for name, seen in memory.stop_seen.items() if now - seen >= self._settings.stop_grace_s
            ),
            submitted_phases=dict(memory.phases),
            orphans=orphans,
            gpus=self._resources.gpus if jobs is not None and self._resources is not None else None,
            foreign_gpus=self._foreign_gpus(now),
            closed=self._closed,
            was_away=now - self._ticked_at > self._settings.lease_s / 2,
        )

    async def _ease(self, live: Collection[str], now: float) -> None:
        """Do what makes Ray quicker: what fails of it (the head's agent is behind a firewall) keeps no run waiting."""
        try:
            if now - self._pruned_at > _PRUNE_S:
                self._pruned_at = now
                await self._launcher.prune(self._owner, keep=_KEPT_JOBS, spare=live)
            if not self._is_prepared:
                self._is_prepared = True
                await self._launcher.prepare()
        except LauncherUnavailable as error:
            logger.warning("Ray is left as it is: %s", error, extra={"action": "ray_uneased"})

    def _live_submission_ids(self) -> list[str]:
        with self._database.read() as session:
            return AttemptRepository(session).live_jobs()

    async def _sweep(self, live: Collection[str], now: float) -> frozenset[str]:
        found = find_orphans(live, await self._launcher.active_jobs(), owner=self._owner)
        found -= self._memory.submitting
        confirmed, self._memory.suspects, self._swept_at = found & self._memory.suspects, found, now
        return confirmed

    def _note_reachable(self) -> None:
        if self._problem is not None:
            logger.info("Ray is reachable", extra={"action": "ray_reachable"})
            self._problem = None

    def _forget_submitted(self, now: float) -> None:
        # `now` is when this observation began: what was submitted before it, the jobs just read would have shown.
        submitted_at = self._memory.submitted_at
        for name in [name for name, at in submitted_at.items() if at < now]:
            del submitted_at[name]

    def _foreign_gpus(self, now: float) -> float:
        memory = self._memory
        memory.released = [(at, gpus) for at, gpus in memory.released if now - at < _USAGE_LAG_S]
        used = self._resources.gpus_used if self._resources is not None else 0.0
        ours = sum(memory.held.values()) + sum(gpus for _, gpus in memory.released)
        return max(0.0, used - ours)

    # -- decide ------------------------------------------------------------------------------------------------------

    def _decide(self, situation: Situation) -> Plan:
        with self._database.write() as session:
            if self._leadership is not None:
                self._leadership.confirm(session)
            plan = self._planner.plan(session, replace(situation, clock_jumped=self._clock_jumped(session)))
            plan.is_unfinished |= self._evaluator.evaluate(session, with_silence=self._could_be_heard())
            return plan

    def _could_be_heard(self) -> bool:
        """Whether this one has led for long enough that workers would have reached it with their steps."""
        now = self._clock()
        if self._led_since == float("-inf") or now - self._ticked_at > self._settings.lease_s / 2:
            self._led_since = now
        return now - self._led_since >= self._settings.lease_s

    def _clock_jumped(self, session: Session) -> bool:
        """Whether the database's clock was set, or the machine slept, since the last tick."""
        lead = read_clock(session).timestamp() - self._clock()
        before, self._clock_lead = self._clock_lead, lead
        return before is not None and abs(lead - before) > self._settings.lease_s / 4

    # -- act ---------------------------------------------------------------------------------------------------------

    def _act(self, plan: Plan) -> None:
        for submission_id, token in plan.submissions.items():
            self._memory.submitting.add(submission_id)
            self._spawn(self._submit(submission_id, token, plan.working_dirs.get(submission_id)))
        now = self._clock()
        for submission_id, why in plan.stops.items():
            if now - self._memory.stop_sent.get(submission_id, float("-inf")) >= _STOP_AGAIN_S:
                self._memory.stop_sent[submission_id] = now
                self._spawn(self._stop(submission_id, why))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, submission_id: str, token: str, working_dir: str | None) -> None:
        home = self._settings.effective_workers_home
        try:
            urls = self._settings.effective_advertise_url
            if self._leadership is not None:
                urls = await asyncio.to_thread(self._leadership.urls)
            request = JobRequest(
                submission_id, self._owner, urls, token, None if home is None else str(home), working_dir
            )
            # Before it is sent: its driver may have started by the time that Ray's answer is read.
            sent_at = time.time()
            await self._launcher.submit(request)
            self._memory.phases[submission_id] = sent_at
        except JobRefused as error:
            logger.warning("Ray refused %s", submission_id, extra={"action": "job_refused"})
            self._memory.refusals[submission_id] = Failure(kind=FailureKind.SETUP_FAILED, message=str(error)[:20_000])
        except OSError as error:
            # What the driver is to read cannot be written.
            logger.warning("submitting %s: %s", submission_id, error, extra={"action": "submit_failed"})
            message = f"the job could not be submitted: {error}"
            self._memory.refusals[submission_id] = Failure(kind=FailureKind.SETUP_FAILED, message=message)
        except (LauncherUnavailable, Unavailable) as error:
            # Whether the job was taken is unknown: the next observation shows it, or the attempt is lost.
            logger.warning("submitting %s: %s", submission_id, error, extra={"action": "submit_unanswered"})
        finally:
            self._memory.submitting.discard(submission_id)
            self._memory.submitted_at[submission_id] = self._clock()
            self._wake.set()

    async def _deliver(self, message: Message) -> None:
        await self._deliverer.deliver(message)
        # The next one of its rule may have waited for this one.
        self._wake.set()

    async def _stop(self, submission_id: str, why: str) -> None:
        try:
            await self._launcher.stop(submission_id)
            logger.info("stopped job %s: %s", submission_id, why, extra={"action": "job_stopped"})
        except LauncherUnavailable as error:
            self._memory.stop_sent.pop(submission_id, None)
            logger.warning("stopping %s: %s", submission_id, error, extra={"action": "stop_unanswered"})

    def _remember(self, plan: Plan, situation: Situation, now: float) -> None:
        memory = self._memory
        for name in situation.submitted_phases:
            memory.phases.pop(name, None)
        for name in situation.refusals.keys() - plan.held.keys():
            # Those that are still held are closed in a later tick.
            memory.refusals.pop(name, None)
        memory.stop_seen = {name: memory.stop_seen.get(name, now) for name in plan.stopping}
        memory.stop_sent = {name: at for name, at in memory.stop_sent.items() if now - at < 60}
        memory.released += [(now, gpus) for name, gpus in memory.held.items() if name not in plan.held]
        memory.held = dict(plan.held)
        self._is_idle, self._is_filling = plan.is_idle, bool(plan.submissions)
