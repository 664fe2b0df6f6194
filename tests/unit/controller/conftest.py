"""A migrated SQLite store and a controller on a cluster in memory."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.attempts import AttemptOutcome, Failure, Heartbeat
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus
from service.conclusion import accept_outcome
from service.controller.loop import ControllerLoop
from service.controller.transitions import LEGAL
from service.settings import Settings
from service.store import migrate
from service.store.attempts import AttemptRepository
from service.store.events import EventRepository
from service.store.runs import RunRepository
from service.store.session import Database
from tests.unit.controller.fakes import FakeLauncher

OWNER = "this-store"


@dataclass
class Desk:
    """What a test does to the controller and sees of it."""

    database: Database
    launcher: FakeLauncher
    settings: Settings
    loop: ControllerLoop
    clock: list[float] = field(default_factory=lambda: [1000.0])

    def submit(self, **spec: Any) -> str:
        with self.database.write() as session:
            return RunRepository(session).create(RunSpec(**spec))[0].uid

    def tick(self, times: int = 1) -> None:
        async def ticks() -> None:
            for _ in range(times):
                self.pass_time(0.01)
                await self.loop.tick()
                await self.loop.settle()

        asyncio.run(ticks())

    def status(self, uid: str) -> RunStatus:
        with self.database.read() as session:
            return RunRepository(session).get(uid).status

    def run(self, uid: str) -> Any:
        with self.database.read() as session:
            return RunRepository(session).get(uid)

    def attempt_statuses(self, uid: str) -> list[AttemptStatus]:
        return [attempt.status for attempt in self.run(uid).attempts]

    def enrol(self, submission_id: str, *, lease_s: float = 30.0) -> None:
        """Do what a driver does first: exchange its token, then say that it trains."""
        token = self.launcher.requests[submission_id].enrolment_token
        with self.database.write() as session:
            attempts, runs = AttemptRepository(session), RunRepository(session)
            attempt = attempts.enrol(submission_id, enrolment_token=token, token="t", lease_s=lease_s)
            attempts.heartbeat(attempt, Heartbeat(status=AttemptStatus.RUNNING), lease_s=lease_s)
            attempts.set_status(attempt, AttemptStatus.RUNNING, who="workers", why="trains")
            runs.set_status(runs.get(attempt.run.uid), RunStatus.RUNNING, legal=LEGAL, who="workers", why="trains")

    def report(self, submission_id: str, status: AttemptStatus, kind: FailureKind | None = None) -> None:
        """Do what a driver does last."""
        failure = Failure(kind=kind, message=str(kind)) if kind is not None else None
        with self.database.write() as session:
            accept_outcome(
                session,
                AttemptRepository(session).get(submission_id),
                AttemptOutcome(status=status, declared_steps=0, failure=failure),
                legal=LEGAL,
                retry_reason=self.loop.retry_reason,
            )

    def request_stop(self, uid: str) -> None:
        with self.database.write() as session:
            runs = RunRepository(session)
            runs.request_stop(runs.get(uid), who="test")

    def events(self, uid: str) -> list[tuple[str, str | None, str | None]]:
        with self.database.read() as session:
            run = RunRepository(session).get(uid)
            return [(row.kind, row.from_status, row.to_status) for row in EventRepository(session).after(run=run)]

    def restart(self) -> None:
        """Lose all that the controller remembers, as `kill -9` does."""
        self.loop = ControllerLoop(self.database, self.launcher, self.settings, owner=OWNER, clock=self.now)

    def now(self) -> float:
        return self.clock[0]

    def pass_time(self, seconds: float) -> None:
        """Move the controller's monotonic clock; leases are on the database's."""
        self.clock[0] += seconds


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty store, made once by the real migrations; tests copy it."""
    path = tmp_path_factory.mktemp("store") / "migrated.db"
    database = Database(f"sqlite:///{path}")
    migrate.upgrade(database)
    database.dispose()
    return path


@pytest.fixture
def make_desk(tmp_path: Path, migrated_file: Path) -> Iterator[Callable[..., Desk]]:
    databases: list[Database] = []

    def make(*, gpus: float = 2.0, **overrides: Any) -> Desk:
        values: dict[str, Any] = {"home": tmp_path, "retry_backoff_s": 0.0, **overrides}
        settings = Settings(**values)
        path = shutil.copyfile(migrated_file, tmp_path / f"{len(databases)}.db")
        database = Database(f"sqlite:///{path}")
        databases.append(database)
        launcher = FakeLauncher(gpus)
        desk = Desk(database, launcher, settings, loop=None)  # type: ignore[arg-type]
        desk.restart()
        return desk

    yield make
    for database in databases:
        database.dispose()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()
