"""Which of the controllers that share this store leads: a lease in the database, on its clock.

A lease and not a session's lock: a leader whose network is gone, or which is stopped, loses it all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, select, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.errors import ServiceError
from service.store.events import EventRepository
from service.store.models import Controller, Leadership
from service.store.session import Database
from service.store.types import read_clock

# A controller that has not been seen for so long is not told to workers, and forgotten after the second.
SEEN_LATELY_S = 60.0
FORGOTTEN_AFTER_S = 86400.0
# A process that is stopped, or cut off, in a transaction that has looked who leads keeps all others from looking: the
# server ends it before its lease does.
IDLE_LIMIT_S = 8.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Who leads, after a claim."""

    leader: str
    term: int
    leader_url: str
    leader_place: str


class LeadershipRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def register(self, controller_id: str, *, url: str, place: str) -> None:
        """Say that a controller is there."""
        now = read_clock(self._session)
        row = self._session.get(Controller, controller_id)
        if row is None:
            row = Controller(id=controller_id, url=url, place=place)
            self._session.execute(
                delete(Controller).where(Controller.seen_at < now - timedelta(seconds=FORGOTTEN_AFTER_S))
            )
        row.url, row.place, row.seen_at = url, place, now
        self._session.add(row)
        self._session.flush()

    def claim(self, controller_id: str, *, lease_s: float, dead: str | None = None) -> Standing:
        """Lead, or go on leading, if nobody else does.

        Args:
            controller_id: a registered one.
            lease_s: how long the claim holds unless it is renewed.
            dead: a leader that is proven gone: its lease need not run out.
        """
        row = self._row()
        now = read_clock(self._session)
        before = row.holder
        if before in (None, controller_id, dead) or row.expires_at < now:
            row.expires_at = now + timedelta(seconds=lease_s)
            if before != controller_id:
                row.holder, row.term = controller_id, row.term + 1
                why = "nobody led" if before is None else f"{before} was silent for too long"
                EventRepository(self._session).append(
                    "leader", from_status=before, to_status=controller_id, who=controller_id,
                    why=f"{controller_id} is gone" if before is not None and before == dead else why,
                    detail={"term": row.term},
                )  # fmt: skip
            self._session.flush()
        leader = self._session.get(Controller, row.holder)
        return Standing(row.holder or "", row.term, leader.url if leader else "", leader.place if leader else "")

    def confirm(self, controller_id: str, term: int) -> bool:
        """Say whether a controller still leads, and keep anyone else from it until this transaction ends."""
        self._limit_idling()
        changed = self._session.execute(
            update(Leadership)
            .where(Leadership.id == 1, Leadership.holder == controller_id, Leadership.term == term)
            .values(term=term),
            execution_options={"synchronize_session": False},
        )
        return bool(changed.rowcount == 1)  # type: ignore[attr-defined]

    def release(self, controller_id: str) -> None:
        """Stop leading and be forgotten, so that another may take over at once."""
        row = self._row()
        if row.holder == controller_id:
            row.holder = None
            self._session.flush()
        self._session.execute(delete(Controller).where(Controller.id == controller_id))

    def urls(self, *, first: str) -> Sequence[str]:
        """List the addresses of the controllers seen lately, this one first."""
        since = read_clock(self._session) - timedelta(seconds=SEEN_LATELY_S)
        query = select(Controller.url).where(Controller.seen_at > since).order_by(Controller.id)
        return list(dict.fromkeys([first, *self._session.scalars(query)]))

    def leader_url(self) -> str | None:
        """Return the address of the controller that leads now; None where no lease holds."""
        query = (
            select(Controller.url)
            .join(Leadership, Leadership.holder == Controller.id)
            .where(Leadership.expires_at > read_clock(self._session))
        )
        return self._session.scalar(query)

    def _limit_idling(self) -> None:
        # SQLite's lock is the process's own, and a process that is stopped with it holds up every writer.
        if self._session.get_bind().dialect.name == "postgresql":
            limit_ms = round(IDLE_LIMIT_S * 1000)
            self._session.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {limit_ms}"))

    def _row(self) -> Leadership:
        self._limit_idling()
        row = self._session.get(Leadership, 1, with_for_update=True)
        if row is None:
            row = Leadership(id=1, holder=None, term=0, expires_at=read_clock(self._session))
            self._session.add(row)
            self._session.flush()
        return row


def find_leader(database_url: str) -> str | None:
    """Say who leads on a database that this process does not serve; None where nobody does, or it cannot be read."""
    try:
        database = Database(database_url, pool_size=1)
    except (ValueError, SQLAlchemyError):
        return None
    try:
        if database.path is not None and not database.path.exists():
            # Reading would make it.
            return None
        with database.read() as session:
            return LeadershipRepository(session).leader_url()
    except (ServiceError, SQLAlchemyError):
        # Locked, away, or of a version that had no leaders: starting a service says which.
        return None
    finally:
        database.dispose()
