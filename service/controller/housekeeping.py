"""Housekeeping: once an hour the leading controller deletes the runs that are kept no longer."""

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Final

from service.controller.leadership import Leadership
from service.errors import IllegalTransition, NotFound, Unavailable
from service.settings import Settings
from service.store.retention import Retention
from service.store.session import Database

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 3600.0
# While it does not lead: it begins to moments after its start, or when another one ends.
_LOOK_S: Final = 5.0


class Housekeeper:
    """Runs from `start` to `stop`; without `retention_days` it does nothing."""

    def __init__(self, database: Database, settings: Settings, leadership: Leadership) -> None:
        self._retention = Retention(database, settings.kept_files_home)
        self._days = settings.retention_days
        self._leadership = leadership
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        if self._days is not None:
            self._task = asyncio.create_task(self._keep(), name="housekeeping")

    async def stop(self) -> None:
        """End after the run that is being deleted; the process waits for its threads, and would for all of them."""
        self._ended.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _keep(self) -> None:
        while True:
            leads = self._leadership.is_leading
            if leads:
                try:
                    await asyncio.to_thread(self.tidy)
                except Unavailable as error:
                    logger.warning("housekeeping waits: %s", error, extra={"action": "housekeeping_waits"})
                except Exception:
                    # Whatever it was, nothing else would begin again.
                    logger.exception("housekeeping failed", extra={"action": "housekeeping_failed"})
            await asyncio.sleep(_PERIOD_S if leads else _LOOK_S)

    def tidy(self) -> int:
        """Delete what is kept no longer and return how many runs that were. Blocks."""
        assert self._days is not None
        deleted = 0
        while expired := self._retention.expired(self._days):
            before = deleted
            for uid in expired:
                if self._ended.is_set():
                    return deleted
                # Queued again or deleted by someone else meanwhile.
                with suppress(NotFound, IllegalTransition):
                    self._retention.delete(uid, who="controller", why=f"ended more than {self._days:g} days ago")
                    deleted += 1
            if deleted == before:
                break
        if deleted:
            self._retention.reclaim()
            logger.info("deleted %d runs that are kept no longer", deleted, extra={"action": "runs_deleted"})
        return deleted
