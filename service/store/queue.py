"""The queue: who waits in which order, who holds GPUs, whether anything starts, and how much each may hold.

A run's entry is made when it is queued and gone once it has ended. All here is small and read without the runs' specs:
a tick over ten thousand entries must not read ten thousand documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from muonscope.contract.status import LimitKind, QueueMode
from service.errors import InvalidInput, NotFound, Unavailable
from service.store.events import EventRepository
from service.store.models import QueueEntry, QueueLimit, QueueState, Run, RunTag
from service.store.types import read_clock

DEFAULT_AGING_S: Final = 600.0
EVERYBODY: Final = "*"
_ENTRY: Final = QueueEntry.__table__
_FIRST_PAGE: Final = 64

Place = tuple[float, int]
"""Rank and run id: where in the line."""


class Entry(NamedTuple):
    """One run's place, as a tick reads it."""

    run_id: int
    rank: float
    gpus: float
    owner: str
    failed_at: datetime | None
    attempts: int
    reason: str | None


def gpus_of(run: Run) -> float:
    """Return how many GPUs a run takes."""
    share = (run.spec.get("resources") or {}).get("gpus_per_rank", 1.0)
    return float(run.world_size * share)


def _waits(*, behind: Place | None = None) -> ColumnElement[bool]:
    table = _ENTRY.c
    waits = table.is_live.is_(False)
    if behind is None:
        return waits
    rank, run_id = behind
    return waits & (table.rank >= rank) & or_(table.rank > rank, table.run_id > run_id)


def _place_of_one() -> Select[int]:
    table, own = _ENTRY.c, _ENTRY.alias("own").c
    before = or_(table.rank < own.rank, (table.rank == own.rank) & (table.run_id <= own.run_id))
    asked = own.run_id == bindparam("run_id")
    return select(func.count()).where(asked, own.is_live.is_(False), table.is_live.is_(False), before)


# Built once: each submission asks these, and building a statement costs more than running it.
_PLACE_OF_ONE: Final = _place_of_one()
_NEWEST: Final = (
    select(_ENTRY.c.queued_at).where(_ENTRY.c.run_id != bindparam("run_id")).order_by(_ENTRY.c.run_id.desc()).limit(1)
)
_ENTER: Final = insert(QueueEntry)


class QueueRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    # -- who waits and who holds ------------------------------------------------------------------------------------

    def enter(self, run: Run, *, attempts: int = 0, failed_at: datetime | None = None, is_new: bool = False) -> None:
        """Put a run into the line: behind all of its priority, or back to its old place if it holds GPUs now.

        Args:
            run: the run.
            attempts: how many it has had.
            failed_at: when the last of them ended by no fault of the run.
            is_new: whether it was accepted in this very transaction.
        """
        values = {"is_live": False, "owner": run.submitted_by or "", "reason": None, "attempts": attempts}
        values["failed_at"] = failed_at
        if not is_new and self._change(run, values):
            return
        now = run.created_at if is_new else read_clock(self._session)
        # Not before the one before it: a clock that jumps back must not let the last one in first.
        connection = self._session.connection()
        newest = connection.scalars(_NEWEST, {"run_id": run.id}).one_or_none()
        queued_at = now if newest is None else max(now, newest)
        rank = queued_at.timestamp() - run.priority * self.state().aging_s
        values |= {"run_id": run.id, "rank": rank, "gpus": gpus_of(run), "queued_at": queued_at}
        connection.execute(_ENTER, values)

    def hold(self, run: Run) -> None:
        """Note that a run has left the line and holds its GPUs."""
        self._change(run, {"is_live": True, "reason": None})

    def leave(self, run: Run) -> None:
        """Note that a run has ended."""
        self._session.execute(
            delete(QueueEntry).where(QueueEntry.run_id == run.id), execution_options={"synchronize_session": False}
        )

    def _change(self, run: Run, values: Mapping[str, Any]) -> bool:
        """Change a run's entry; returns whether there is one."""
        changed = self._session.execute(
            update(QueueEntry).where(QueueEntry.run_id == run.id).values(**values),
            execution_options={"synchronize_session": False},
        )
        return bool(changed.rowcount == 1)  # type: ignore[attr-defined]

    def line(self) -> Iterator[Entry]:
        """Give those that wait, first in the line first, read a page at a time as they are asked for."""
        size, last = _FIRST_PAGE, None
        while page := self._entries(_waits(behind=last), limit=size):
            yield from page
            if len(page) < size:
                return
            # A short look reads little, a long one asks seldom.
            size, last = 4 * size, (page[-1].rank, page[-1].run_id)

    def larger(self, gpus: float, *, behind: Place) -> list[Entry]:
        """List those of the line behind a place that want more GPUs than these."""
        return self._entries(_waits(behind=behind) & (_ENTRY.c.gpus > gpus))

    def told_otherwise(
        self, reason: str, *, behind: Place | None = None, most_gpus: float | None = None, limit: int
    ) -> list[int]:
        """List the runs of the line behind a place, of at most so many GPUs, that were told another reason, or none."""
        table = _ENTRY.c
        wanted = _waits(behind=behind) & table.reason.is_distinct_from(reason)
        if most_gpus is not None:
            wanted &= table.gpus <= most_gpus
        query = select(table.run_id).where(wanted).order_by(table.rank, table.run_id).limit(limit)
        return list(self._session.scalars(query))

    def sizes(self) -> tuple[float, float] | None:
        """Return the fewest and the most GPUs that a run of the line wants; None where nobody waits."""
        query = select(func.min(_ENTRY.c.gpus), func.max(_ENTRY.c.gpus)).where(_waits())
        least, most = self._session.execute(query).one()
        return None if least is None else (least, most)

    def holding(self) -> list[Entry]:
        """List the runs that hold GPUs."""
        return self._entries(_ENTRY.c.is_live.is_(True))

    def _entries(self, wanted: ColumnElement[bool], *, limit: int | None = None) -> list[Entry]:
        table = _ENTRY.c
        query = select(*(table[name] for name in Entry._fields)).where(wanted)
        # All at once: fetched one by one, ten thousand rows take a tick twice as long.
        rows = self._session.execute(query.order_by(table.rank, table.run_id).limit(limit)).all()
        return list(map(Entry._make, rows))

    def counts(self) -> tuple[int, int]:
        """Return how many runs wait and how many hold GPUs."""
        rows = self._session.execute(select(_ENTRY.c.is_live, func.count()).group_by(_ENTRY.c.is_live))
        counts = {bool(is_live): count for is_live, count in rows}
        return counts.get(False, 0), counts.get(True, 0)

    def refuse_while_draining(self) -> None:
        """Raises Unavailable: the queue is draining and takes no submissions."""
        state = self.state()
        if state.mode is QueueMode.DRAINING:
            raise Unavailable(
                f"the queue is draining, by {state.who}" + (f": {state.why}" if state.why else ""),
                remedy="submit again once `muonscope queue resume` was called",
            )

    def tags_of(self, names: Sequence[str]) -> dict[int, frozenset[str]]:
        """Return, by run, which of these tags the runs in the queue carry; all of their tags for `*`."""
        query = select(RunTag.run_id, RunTag.tag).join(QueueEntry, QueueEntry.run_id == RunTag.run_id)
        if EVERYBODY not in names:
            query = query.where(RunTag.tag.in_(names))
        found: dict[int, set[str]] = {}
        for run_id, tag in self._session.execute(query):
            found.setdefault(run_id, set()).add(tag)
        return {run_id: frozenset(tags) for run_id, tags in found.items()}

    def positions(self, run_ids: Sequence[int]) -> dict[int, int]:
        """Return the place in the line, from 1, of those of these runs that wait."""
        table = _ENTRY.c
        if len(run_ids) == 1:
            place = self._session.scalars(_PLACE_OF_ONE, {"run_id": run_ids[0]}).one()
            return {run_ids[0]: place} if place else {}
        row_number = func.row_number().over(order_by=(table.rank, table.run_id)).label("place")
        line = select(table.run_id, row_number).where(table.is_live.is_(False)).subquery()
        rows = self._session.execute(select(line.c.run_id, line.c.place).where(line.c.run_id.in_(run_ids)))
        return {run_id: place for run_id, place in rows}  # noqa: C416 (rows are no pairs to the type checker)

    def set_reasons(self, reasons: Mapping[int, str]) -> None:
        """Say why each of these runs waits."""
        if not reasons:
            return
        revision = self._session.scalars(select(func.coalesce(func.max(Run.revision), 0))).one()
        rows = [
            {"b_id": run_id, "b_reason": reason, "b_revision": revision + place}
            for place, (run_id, reason) in enumerate(reasons.items(), start=1)
        ]
        # On the connection, not the session: thousands of rows are changed without being loaded.
        connection = self._session.connection()
        connection.execute(
            update(Run)
            .where(Run.id == bindparam("b_id"))
            .values(waiting_reason=bindparam("b_reason"), revision=bindparam("b_revision")),
            rows,
        )
        connection.execute(
            update(QueueEntry).where(QueueEntry.run_id == bindparam("b_id")).values(reason=bindparam("b_reason")),
            [{"b_id": row["b_id"], "b_reason": row["b_reason"]} for row in rows],
        )

    # -- whether anything starts ------------------------------------------------------------------------------------

    def state(self) -> QueueState:
        """Return the queue's one row."""
        # Kept with the session: what nobody holds, the session forgets, and a submission asks twice.
        state = self._session.info.get("queue_state") or self._session.get(QueueState, 1)
        if state is None:
            state = QueueState(id=1, mode=QueueMode.OPEN, aging_s=DEFAULT_AGING_S, who="store", why="made",
                               changed_at=read_clock(self._session))  # fmt: skip
            self._session.add(state)
            self._session.flush()
        self._session.info["queue_state"] = state
        return state

    def set_mode(self, mode: QueueMode, *, who: str, why: str) -> bool:
        """Open, pause or drain the queue; returns whether that was a change."""
        state = self.state()
        if state.mode is mode:
            return False
        EventRepository(self._session).append("queue_mode", from_status=state.mode, to_status=mode, who=who, why=why)
        state.mode, state.who, state.why, state.changed_at = mode, who, why, read_clock(self._session)
        return True

    def reckon_with(self, aging_s: float) -> None:
        """Rank the line anew where it was ranked with another `aging_s`."""
        state = self.state()
        if state.aging_s == aging_s:
            return
        state.aging_s = aging_s
        query = select(QueueEntry, Run.priority).join(Run, Run.id == QueueEntry.run_id)
        for entry, priority in self._session.execute(query):
            entry.rank = entry.queued_at.astimezone(UTC).timestamp() - priority * aging_s

    # -- how much each may hold -------------------------------------------------------------------------------------

    def limits(self) -> Sequence[QueueLimit]:
        return self._session.scalars(select(QueueLimit).order_by(QueueLimit.kind, QueueLimit.name)).all()

    def set_limit(self, kind: LimitKind, name: str, max_gpus: float, *, who: str) -> QueueLimit:
        """Let a user's or a tag's runs hold at most so many GPUs at once; `*` is each one without its own limit.

        Raises:
            InvalidInput: no name.
        """
        if not name.strip():
            raise InvalidInput("a limit is somebody's", field="name", value=name, remedy=f"give a {kind}, or *")
        row = self._session.get(QueueLimit, (kind, name))
        if row is None:
            row = QueueLimit(kind=kind, name=name)
        self._tell(
            row, f"{kind} {name} may hold {max_gpus:g} GPU{'' if max_gpus == 1 else 's'}", who, {"max_gpus": max_gpus}
        )
        row.max_gpus, row.who, row.changed_at = max_gpus, who, read_clock(self._session)
        self._session.add(row)
        return row

    def remove_limit(self, kind: LimitKind, name: str, *, who: str) -> None:
        """Raises NotFound: there is no such limit."""
        row = self._session.get(QueueLimit, (kind, name))
        if row is None:
            raise NotFound(f"there is no limit of {kind} {name}", field="name", value=name)
        self._tell(row, f"{kind} {name} has no limit", who, {"max_gpus": None})
        self._session.delete(row)

    def _tell(self, row: QueueLimit, why: str, who: str, detail: dict[str, Any]) -> None:
        EventRepository(self._session).append(
            "queue_limit", who=who, why=why, detail={"kind": str(row.kind), "name": row.name, **detail}
        )
