"""mirror: how far each run's record is carried to another tracker, kept after every piece that it took."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from service.columns import StepColumns
from service.store.models import Attempt, Mirror, Run
from service.store.step_rows import SERIES_FIELDS
from service.store.steps import StepRepository


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run's mirror goes on."""

    remote_id: str
    attempt: int = 0
    next_step: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class AttemptSteps:
    """Some steps of one attempt, in order."""

    attempt: int
    created_ms: int
    """When the attempt began, in Unix milliseconds."""
    columns: StepColumns


class MirrorRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def behind(self, target: str, *, limit: int) -> Sequence[tuple[str, int]]:
        """List runs that began and of which the target lacks something: (uid, revision), longest unchanged first."""
        is_behind = or_(Mirror.run_id.is_(None), Mirror.target != target, Mirror.revision < Run.revision)
        rows = self._session.execute(
            select(Run.uid, Run.revision)
            .outerjoin(Mirror, Mirror.run_id == Run.id)
            .where(Run.epoch > 0, is_behind)
            .order_by(Run.revision)
            .limit(limit)
        )
        return [(uid, revision) for uid, revision in rows]

    def cursor(self, run: Run, target: str) -> Cursor | None:
        """Return where this target's mirror of the run goes on; None: it has nothing yet."""
        row = self._session.get(Mirror, run.id)
        if row is None or row.target != target:
            return None
        return Cursor(row.remote_id, row.attempt, row.next_step, row.revision)

    def steps_after(self, run: Run, cursor: Cursor, *, limit: int) -> AttemptSteps | None:
        """Return the next steps, at most `limit` and all of one attempt; None: nothing is left."""
        attempts = self._session.execute(
            select(Attempt.id, Attempt.number, Attempt.created_at, Attempt.first_step, Attempt.next_step)
            .where(Attempt.run_id == run.id, Attempt.number >= cursor.attempt, Attempt.stored_steps > 0)
            .order_by(Attempt.number)
        )
        for attempt_id, number, created_at, first_step, stop in attempts:
            start = cursor.next_step if number == cursor.attempt else first_step
            if start < stop:
                columns = StepRepository(self._session).attempt_columns(
                    attempt_id, SERIES_FIELDS, start=start, stop=stop, limit=limit
                )
                return AttemptSteps(number, int(created_at.timestamp() * 1000), columns)
        return None

    def advance(self, uid: str, target: str, cursor: Cursor) -> None:
        """Keep where the mirror goes on; of a run that was deleted meanwhile there is nothing to keep."""
        run_id = self._session.scalars(select(Run.id).where(Run.uid == uid)).one_or_none()
        if run_id is None:
            return
        row = self._session.get(Mirror, run_id) or Mirror(run_id=run_id)
        row.target, row.remote_id, row.attempt = target, cursor.remote_id, cursor.attempt
        row.next_step, row.revision = cursor.next_step, cursor.revision
        self._session.add(row)
