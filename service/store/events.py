"""Events: every status change and alarm, with who and why; added, never changed."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session, joinedload

from service.store.models import Attempt, Event, Run
from service.store.types import read_clock


class EventRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def append(
        self,
        kind: str,
        *,
        who: str,
        why: str,
        run: Run | None = None,
        attempt: Attempt | None = None,
        from_status: str | None = None,
        to_status: str | None = None,
        detail: dict[str, Any] | None = None,
        at: datetime | None = None,
    ) -> Event:
        """Add one event, in the caller's transaction.

        Args:
            kind: `run_status`, `attempt_status`, `alarm`, `gap`, or a word of the caller's, at most 32 characters.
            run: what it happened to; taken from `attempt` where that is given alone.
            attempt: the execution it happened in.
            at: what the database's clock said in this transaction, where the caller has read it.
        """
        run_id = run.id if run is not None else attempt.run_id if attempt is not None else None
        row = Event(
            run_id=run_id,
            attempt=attempt.number if attempt is not None else None,
            at=at if at is not None else read_clock(self._session),
            kind=kind,
            from_status=from_status,
            to_status=to_status,
            who=who,
            why=why,
            detail=detail,
        )
        self._session.add(row)
        return row

    def after(self, event_id: int = 0, *, run: Run | None = None, limit: int = 1000) -> Sequence[Event]:
        """List events after an id, oldest first, with the runs they happened to loaded."""
        query = select(Event).where(Event.id > event_id).order_by(Event.id).limit(limit).options(joinedload(Event.run))
        if run is not None:
            query = query.where(Event.run_id == run.id)
        return self._session.scalars(query).all()

    def last_id(self) -> int:
        """Return the newest event's id, 0 where there is none."""
        return self._session.scalars(select(func.coalesce(func.max(Event.id), 0))).one()
