"""The change feed: one reader of the database for all live views.

A view holds no buffer, only its place (a revision). Recent changes lie in one bounded window that all share; a view
that has fallen out of it reads from the database, whose rows are the log. So a slow reader costs nothing but itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.api.responses import dumps
from service.api.schemas import present_run
from service.store.models import Run
from service.store.runs import RunRepository
from service.store.session import Database

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_WINDOW: Final = 1024
_BATCH: Final = 200


@dataclass(frozen=True, slots=True)
class Change:
    """A run as it is since this revision."""

    revision: int
    run_id: str
    data: bytes
    """The run's JSON."""


class ChangeFeed:
    """Tells waiting views that runs have changed. Belongs to one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._window: deque[Change] = deque(maxlen=_WINDOW)
        self._floor = 0
        """The window holds every change after this revision."""
        self._newest = 0
        self._era = 0
        self._changed = asyncio.Event()
        self._poke = asyncio.Event()
        self._readers = 0
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def num_readers(self) -> int:
        return self._readers

    def notify(self) -> None:
        """Look now; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._poke.set)

    def close(self) -> None:
        """End every view; from any thread."""
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_all)

    async def start(self) -> None:
        """Begin following changes from now on."""
        self._loop = asyncio.get_running_loop()
        self._floor = self._newest = await asyncio.to_thread(self.last_revision)
        self._task = asyncio.create_task(self._follow(), name="change-feed")

    async def stop(self) -> None:
        self.close()
        if self._task is not None:
            await self._task

    @property
    def newest(self) -> int:
        return self._newest

    @property
    def era(self) -> int:
        """Changes when revisions have begun again, as in a store that was emptied: a place means nothing any more."""
        return self._era

    def enter(self) -> None:
        self._readers += 1
        self._poke.set()

    def leave(self) -> None:
        self._readers -= 1

    async def wait(self, after: int, timeout_s: float) -> bool:
        """Wait for a change after a revision; False: none came in time."""
        if self._newest > after or self._closed:
            return True
        event = self._changed
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def after(self, revision: int) -> Sequence[Change]:
        """Return changes after a revision, oldest first, a batch at most; of each run its newest state only."""
        if revision < self._floor:
            return await asyncio.to_thread(self._read, revision)
        found = [change for change in self._window if change.revision > revision]
        latest = {change.run_id: change.revision for change in found}
        return [change for change in found if latest[change.run_id] == change.revision]

    async def latest(self, run_id: str, revision: int) -> Change | None:
        """Return a run's newest state where it changed after a revision."""
        if revision < self._floor:
            change = await asyncio.to_thread(self.read_run, run_id)
            return change if change.revision > revision else None
        newer = (change for change in reversed(self._window) if change.revision > revision)
        return next((change for change in newer if change.run_id == run_id), None)

    def read_run(self, run_id: str) -> Change:
        """Read a run's state now; raises NotFound. Blocks."""
        with self._database.read() as session:
            runs = RunRepository(session)
            run = runs.get(run_id)
            return _change(run, runs.queue_positions([run]))

    def last_revision(self) -> int:
        """Read the newest revision there is. Blocks."""
        with self._database.read() as session:
            return RunRepository(session).last_revision()

    async def _follow(self) -> None:
        while not self._closed:
            self._poke.clear()
            if self._readers:
                try:
                    await self._look()
                except Exception:
                    logger.exception("the change feed could not read", extra={"action": "feed_failed"})
            try:
                await asyncio.wait_for(self._poke.wait(), _POLL_S if self._readers else 5.0)
            except TimeoutError:
                continue

    async def _look(self) -> None:
        while changes := await asyncio.to_thread(self._read, self._newest):
            for change in changes:
                if len(self._window) == _WINDOW:
                    self._floor = self._window[0].revision
                self._window.append(change)
            self._newest = changes[-1].revision
            self._wake_all()
        if await asyncio.to_thread(self.last_revision) < self._newest:
            self._window.clear()
            self._floor = self._newest = 0
            self._era += 1
            self._wake_all()

    def _wake_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._poke.set()

    def _read(self, revision: int) -> list[Change]:
        with self._database.read() as session:
            runs = RunRepository(session)
            changed = runs.changed_after(revision, limit=_BATCH)
            positions = runs.queue_positions(changed)
            return [_change(run, positions) for run in changed]


def _change(run: Run, positions: Mapping[str, int]) -> Change:
    return Change(run.revision, run.uid, dumps(present_run(run, positions).model_dump(mode="json")))
