"""A model of the whole queue: submit, tick, enrol, die, vanish, stop, retry, restart, in any order."""

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import event

from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus
from service.controller.launcher import JobStatus
from service.controller.transitions import LEGAL
from service.settings import Settings
from service.store.runs import RunRepository
from service.store.session import Database
from tests.examples import dear
from tests.unit.controller.conftest import Desk
from tests.unit.controller.fakes import FakeLauncher

GPUS = 4
MAX_ATTEMPTS = 3


class QueueMachine(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        path = shutil.copyfile(self.template, self.folder / "store.db")
        settings_ = Settings(home=self.folder, retry_backoff_s=0.0, max_attempts=MAX_ATTEMPTS, stop_grace_s=4.0)
        self.desk = Desk(Database(f"sqlite:///{path}"), FakeLauncher(GPUS), settings_, loop=None)  # type: ignore[arg-type]
        self.desk.restart()
        self.uids: list[str] = []
        self.stop_asked: set[str] = set()
        # Every rule's precondition and every invariant looks at all runs: they are read once a commit.
        self.seen: dict[str, Any] = {}
        self.histories: dict[str, list[tuple[str, str | None, str | None]]] = {}
        event.listen(self.desk.database.engine, "commit", self.look_again)

    def teardown(self) -> None:
        self.desk.database.dispose()
        shutil.rmtree(self.folder)

    # -- what users do -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.uids) < 6)
    @rule(world_size=st.sampled_from([1, 2, 4]), priority=st.integers(-1, 1))
    def submit(self, world_size: int, priority: int) -> None:
        self.uids.append(self.desk.submit(world_size=world_size, priority=priority))

    @precondition(lambda self: self.with_status(RunStatus.PENDING, RunStatus.RUNNING))
    @rule(data=st.data())
    def ask_to_stop(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.with_status(RunStatus.PENDING, RunStatus.RUNNING)))
        self.desk.request_stop(uid)
        self.stop_asked.add(uid)

    @precondition(lambda self: self.with_status(RunStatus.FAILED, RunStatus.STOPPED))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.with_status(RunStatus.FAILED, RunStatus.STOPPED)))
        with self.desk.database.write() as session:
            runs = RunRepository(session)
            runs.set_status(runs.get(uid), RunStatus.QUEUED, legal=LEGAL, who="test", why="retry")
        self.stop_asked.discard(uid)

    # -- what workers do ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.unenrolled())
    @rule(data=st.data())
    def enrol(self, data: st.DataObject) -> None:
        self.desk.enrol(data.draw(st.sampled_from(self.unenrolled())))

    @precondition(lambda self: self.training())
    @rule(
        data=st.data(),
        end=st.sampled_from(
            [
                (AttemptStatus.SUCCEEDED, None),
                (AttemptStatus.FAILED, FailureKind.LOSS_SCALE_EXHAUSTED),
                (AttemptStatus.FAILED, FailureKind.WORKER_DIED),
                (AttemptStatus.STOPPED, None),
            ]
        ),
    )
    def report(self, data: st.DataObject, end: tuple[AttemptStatus, FailureKind | None]) -> None:
        name = data.draw(st.sampled_from(self.training()))
        self.desk.report(name, *end)
        self.desk.launcher.end(name, JobStatus.SUCCEEDED)

    # -- what the world does -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.jobs_alive())
    @rule(data=st.data(), status=st.sampled_from([JobStatus.FAILED, JobStatus.SUCCEEDED, JobStatus.STOPPED]))
    def end_a_job(self, data: st.DataObject, status: JobStatus) -> None:
        self.desk.launcher.end(data.draw(st.sampled_from(self.jobs_alive())), status)

    @rule()
    def restart_the_cluster(self) -> None:
        self.desk.launcher.forget_all()

    @rule(reachable=st.booleans())
    def reach(self, reachable: bool) -> None:
        self.desk.launcher.is_reachable = reachable

    @rule()
    def kill_the_controller(self) -> None:
        self.desk.restart()

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.desk.pass_time(seconds)
        self.desk.tick()

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def no_more_gpus_are_given_than_there_are(self) -> None:
        live = (RunStatus.PENDING, RunStatus.RUNNING)
        assert sum(run.world_size for run in self.runs() if run.status in live) <= GPUS

    @invariant()
    def a_live_run_has_exactly_one_live_attempt_and_others_have_none(self) -> None:
        for run in self.runs():
            alive = [attempt for attempt in run.attempts if not attempt.status.is_terminal]
            assert len(alive) == (run.status in (RunStatus.PENDING, RunStatus.RUNNING))

    @invariant()
    def every_change_was_legal_and_left_an_event(self) -> None:
        for uid in self.uids:
            changes = [(origin, to) for kind, origin, to in self.events(uid) if kind == "run_status"]
            assert changes[0] == (None, "queued")
            assert all(before[1] == after[0] for before, after in pairwise(changes))
            assert all(RunStatus(to) in LEGAL[RunStatus(origin)] for origin, to in changes[1:] if origin and to)
            assert changes[-1][1] == self.run(uid).status

    @invariant()
    def no_attempt_is_submitted_twice_and_none_without_a_row(self) -> None:
        rows = {attempt.submission_id for run in self.runs() for attempt in run.attempts}
        assert set(self.desk.launcher.requests) <= rows

    def settle_everything(self) -> None:
        """Let the world be kind: whatever state this was, every run ends."""
        self.desk.launcher.is_reachable = True
        for _ in range(60):
            self.desk.pass_time(11.0)
            self.desk.tick()
            for name in self.unenrolled():
                self.desk.enrol(name)
            for name in self.training():
                self.desk.report(name, AttemptStatus.SUCCEEDED)
                if name in self.jobs_alive():
                    self.desk.launcher.end(name, JobStatus.SUCCEEDED)
            if all(run.status.is_terminal for run in self.runs()):
                return
        raise AssertionError([(run.uid, run.status, run.waiting_reason) for run in self.runs()])

    # -- looking -----------------------------------------------------------------------------------------------------

    def look_again(self, _: object) -> None:
        self.seen.clear()
        self.histories.clear()

    def run(self, uid: str) -> Any:
        if uid not in self.seen:
            self.seen[uid] = self.desk.run(uid)
        return self.seen[uid]

    def events(self, uid: str) -> list[tuple[str, str | None, str | None]]:
        if uid not in self.histories:
            self.histories[uid] = self.desk.events(uid)
        return self.histories[uid]

    def runs(self) -> list[Any]:
        return [self.run(uid) for uid in self.uids]

    def with_status(self, *statuses: RunStatus) -> list[str]:
        return [run.uid for run in self.runs() if run.status in statuses]

    def live_attempts(self) -> list:  # type: ignore[type-arg]
        found = [attempt for run in self.runs() for attempt in run.attempts if not attempt.status.is_terminal]
        return [attempt for attempt in found if attempt.submission_id in self.desk.launcher.requests]

    def unenrolled(self) -> list[str]:
        return [attempt.submission_id for attempt in self.live_attempts() if attempt.enrolled_at is None]

    def training(self) -> list[str]:
        attempts = [attempt for attempt in self.live_attempts() if attempt.status is AttemptStatus.RUNNING]
        return [attempt.submission_id for attempt in attempts if attempt.submission_id in self.desk.launcher.rows]

    def jobs_alive(self) -> list[str]:
        return [name for name, job in self.desk.launcher.rows.items() if not job.status.is_terminal]


class SettlingMachine(QueueMachine):
    def teardown(self) -> None:
        try:
            self.settle_everything()
        finally:
            super().teardown()


def test_the_queue_keeps_its_promises_whatever_happens(migrated_file: Path) -> None:
    SettlingMachine.template = migrated_file
    run_state_machine_as_test(
        SettlingMachine, settings=settings(max_examples=dear(12), stateful_step_count=20, deadline=None)
    )
