"""Checkpoints that workers have reported complete: where a run's next attempt begins."""

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from muonscope.contract.attempts import CheckpointFact
from service.store.events import EventRepository
from service.store.models import Attempt, Checkpoint, Run
from service.store.runs import RunRepository
from service.store.types import read_clock


class CheckpointRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self, run: Run) -> Sequence[Checkpoint]:
        """List a run's checkpoints that are there, oldest first."""
        query = select(Checkpoint).where(Checkpoint.run_id == run.id).order_by(Checkpoint.step)
        return self._session.scalars(query).all()

    def resume_step(self, run: Run) -> int:
        """Return the step that the run's next attempt begins at: its newest checkpoint's, or 0."""
        newest = select(func.max(Checkpoint.step)).where(Checkpoint.run_id == run.id, Checkpoint.step < run.steps)
        return self._session.scalars(newest).one() or 0

    def note_earlier_start(self, attempt: Attempt, step: int) -> None:
        """Note that an attempt begins before the checkpoint it was given: that one was damaged, an earlier one not.

        Does nothing for a step at which no checkpoint lets it begin, or once steps are stored.
        """
        if attempt.stored_steps == 0 and step in {row.step for row in self.list(attempt.run)}:
            attempt.first_step = attempt.next_step = step
            EventRepository(self._session).append(
                "checkpoint", attempt=attempt, who="workers", why=f"resumed at step {step}: a newer one is damaged"
            )

    def replace(self, attempt: Attempt, found: Sequence[CheckpointFact]) -> None:
        """Take in which of the run's checkpoints are there now; each new or rewritten one leaves an event."""
        run = attempt.run
        known = {row.step: row for row in self.list(run)}
        named = {fact.step: fact for fact in found}
        gone = known.keys() - named.keys()
        if gone:
            self._session.execute(delete(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step.in_(gone)))
        news = [fact for fact in named.values() if self._is_news(known.get(fact.step), fact)]
        now = read_clock(self._session)
        for fact in news:
            row = known.get(fact.step)
            if row is None:
                row = Checkpoint(run_id=run.id, step=fact.step)
            row.attempt, row.total_bytes, row.manifest_sha256 = attempt.number, fact.total_bytes, fact.manifest_sha256
            row.created_at = now
            self._session.add(row)
            EventRepository(self._session).append(
                "checkpoint",
                attempt=attempt,
                who="workers",
                why=f"a checkpoint before step {fact.step} is complete",
                detail={"step": fact.step, "total_bytes": fact.total_bytes},
            )
        if gone or news:
            RunRepository(self._session).touch(run)

    @staticmethod
    def _is_news(row: Checkpoint | None, fact: CheckpointFact) -> bool:
        return row is None or row.manifest_sha256 != fact.manifest_sha256
