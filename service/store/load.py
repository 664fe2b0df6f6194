"""system_load: how busy ranks, nodes and GPUs were, sampled; written once a moment, read as it was written."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from muonscope.contract.attempts import LoadSample
from service.errors import InvalidInput
from service.store.models import Attempt, Run, SystemLoad


class LoadRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, attempt: Attempt, samples: Sequence[LoadSample]) -> None:
        """Keep samples of the attempt's ranks; one of the same rank and moment is there already and stays.

        Raises:
            InvalidInput: a rank that the run does not have.
        """
        for sample in samples:
            if sample.rank >= attempt.run.world_size:
                raise InvalidInput(
                    f"rank {sample.rank} does not exist at world_size={attempt.run.world_size}",
                    field="samples.rank",
                    value=sample.rank,
                    remedy="send the rank that was measured",
                )
        if not samples:
            return
        rows = [
            {**sample.model_dump(), "attempt_id": attempt.id, "at": datetime.fromtimestamp(sample.at, UTC)}
            for sample in samples
        ]
        is_sqlite = self._session.get_bind().dialect.name == "sqlite"
        insert = sqlite.insert(SystemLoad) if is_sqlite else postgresql.insert(SystemLoad)
        self._session.execute(insert.on_conflict_do_nothing(), rows)

    def list(
        self, run: Run, *, attempt: int | None = None, after: float = 0.0, limit: int = 10_000
    ) -> Sequence[tuple[int, SystemLoad]]:
        """List (attempt number, sample) of a run by time, then rank.

        Args:
            run: whose.
            attempt: only this attempt's, by number.
            after: only those later than this moment, in Unix seconds.
            limit: at most so many, the oldest.
        """
        query = (
            select(Attempt.number, SystemLoad)
            .join(Attempt, Attempt.id == SystemLoad.attempt_id)
            .where(Attempt.run_id == run.id, SystemLoad.at > datetime.fromtimestamp(after, UTC))
            .order_by(SystemLoad.at, SystemLoad.rank)
            .limit(limit)
        )
        if attempt is not None:
            query = query.where(Attempt.number == attempt)
        return [(number, sample) for number, sample in self._session.execute(query)]
