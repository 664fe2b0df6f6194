"""Deletion that gives disk back: a run with its whole record, and then the space that it took.

A run goes in one transaction: its rows are all there or all gone. The space is given back afterwards, a little at a
time, so that no writer waits long.
"""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import delete, select

from muonscope.contract.status import RunStatus
from service.errors import IllegalTransition
from service.store.audit import AuditAction, AuditRepository
from service.store.events import EventRepository
from service.store.models import Attempt, Block, Event, NonfiniteEvent, ParameterBlock, Run, Step, SystemLoad
from service.store.runs import RunRepository
from service.store.session import Database
from service.store.types import read_clock

_PAGES: Final = 2000
# How long readers, and another deletion, may keep SQLite's file from shrinking before it is left to a later one.
_FOLD_WAIT_S: Final = 10.0
_EARLIEST: Final = datetime(1, 1, 1, tzinfo=UTC)
_ENDED: Final = [status for status in RunStatus if status.is_terminal]
_LARGE: Final = (Step, Block, ParameterBlock, SystemLoad, NonfiniteEvent)


class Retention:
    """Deletes runs. Begins and ends transactions of its own: deletion is more than one."""

    def __init__(self, database: Database, home: Path) -> None:
        """Delete nothing yet.

        Args:
            database: the store.
            home: where this machine's workers keep checkpoints and logs.
        """
        self._database, self._home = database, home

    def delete(self, uid: str, *, who: str, why: str) -> None:
        """Delete an ended run: its record, its checkpoints and its logs on this machine. An event says so.

        Raises:
            NotFound: no such run.
            IllegalTransition: the run has not ended.
        """
        with self._database.write() as session:
            run = RunRepository(session).get(uid)
            if not run.status.is_terminal:
                raise IllegalTransition(
                    f"run {run.uid} is {run.status}; only a run that has ended is deleted",
                    field="status",
                    value=run.status,
                    remedy=f"stop it first: POST /runs/{run.uid}/stop",
                )
            attempts = session.execute(select(Attempt.id, Attempt.submission_id).where(Attempt.run_id == run.id)).all()
            detail = {"run_id": run.uid, "name": run.name, "steps": run.summary.steps}
            for attempt_id, _ in attempts:
                # Table by table is quicker than by the foreign keys, row by row.
                for model in _LARGE:
                    session.execute(delete(model).where(model.attempt_id == attempt_id))
            session.execute(delete(Run).where(Run.id == run.id))
            RunRepository(session).keep_revisions(run.revision)
            EventRepository(session).append("run_deleted", who=who, why=why, detail=detail)
            AuditRepository(session).append(
                AuditAction.RUN_DELETED, who=who, subject=uid, detail=f"{detail['name']}: {why}"
            )
        shutil.rmtree(self._home / "checkpoints" / uid, ignore_errors=True)
        for _, submission_id in attempts:
            shutil.rmtree(self._home / "logs" / submission_id, ignore_errors=True)

    def expired(self, days: float, *, limit: int = 100) -> list[str]:
        """List runs that ended longer ago than this, the oldest first."""
        with self._database.read() as session:
            now = read_clock(session)
            if days > (now - _EARLIEST).days:
                # All that can be kept is: `inf` is a way to say so.
                return []
            oldest_kept = now - timedelta(days=days)
            query = select(Run.uid).where(Run.status.in_(_ENDED), Run.finished_at < oldest_kept)
            return list(session.scalars(query.order_by(Run.finished_at).limit(limit)))

    def reclaim(self) -> None:
        """Give the space of deleted rows back to the file system.

        SQLite's file shrinks at once. PostgreSQL's tables shrink as far as their end is empty; what is free inside
        them is used again.
        """
        if not self._database.is_sqlite:
            self._database.vacuum([model.__tablename__ for model in (*_LARGE, Event, Run)])
            return
        while self._vacuum_some():
            continue
        self._database.fold_log(wait_s=_FOLD_WAIT_S)

    def _vacuum_some(self) -> bool:
        """Give some pages back; returns whether there are more."""
        with self._database.write(durable=False) as session:
            connection = session.connection()
            before = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
            driver = connection.connection.dbapi_connection
            assert driver is not None
            # It works page by page as it is stepped through, and gives no rows: the driver itself must fetch.
            driver.execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
            after = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
        return 0 < after < before
