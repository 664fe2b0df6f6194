"""What ranks and driver printed: kept while they run and after, whatever becomes of the Ray cluster.

Of each rank's log the beginning and the end are kept; a long one's middle is left out, and reading says so.
"""

from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from muonscope.contract.attempts import LogPiece
from service.errors import InvalidInput
from service.store.models import Attempt, AttemptLog
from service.store.types import utf8_bytes

DRIVER: Final = -1
KEPT_HEAD_BYTES: Final = 128 * 1024
KEPT_TAIL_BYTES: Final = 1024 * 1024


class LogRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def append(self, attempt: Attempt, piece: LogPiece) -> int:
        """Keep a piece of a rank's log; one that was kept before changes nothing.

        Returns:
            The byte after the newest kept one.
        Raises:
            InvalidInput: a rank that the run does not have, or a piece that ends before it begins.
        """
        if piece.rank is not None and piece.rank >= attempt.run.world_size:
            raise InvalidInput(f"rank {piece.rank} does not exist at world_size={attempt.run.world_size}",
                               field="rank", value=piece.rank, remedy="send the rank that printed it")  # fmt: skip
        if piece.stop < piece.start:
            raise InvalidInput(f"a piece from byte {piece.start} to {piece.stop} is none", field="stop",
                               value=piece.stop, remedy="send the byte after the piece's last")  # fmt: skip
        rank = DRIVER if piece.rank is None else piece.rank
        end = self._end(attempt, rank)
        if piece.start < end or piece.stop == piece.start:
            return end
        self._session.add(
            AttemptLog(attempt_id=attempt.id, rank=rank, start=piece.start, stop=piece.stop, text=piece.text)
        )
        self._session.flush()
        self._session.execute(
            delete(AttemptLog).where(
                AttemptLog.attempt_id == attempt.id,
                AttemptLog.rank == rank,
                AttemptLog.start >= KEPT_HEAD_BYTES,
                AttemptLog.stop < piece.stop - KEPT_TAIL_BYTES,
            ),
            execution_options={"synchronize_session": False},
        )
        return piece.stop

    def ranks(self, attempt: Attempt) -> dict[int, int]:
        """Return how many bytes each rank has printed; DRIVER is the driver."""
        query = select(AttemptLog.rank, func.max(AttemptLog.stop)).where(AttemptLog.attempt_id == attempt.id)
        return {rank: stop for rank, stop in self._session.execute(query.group_by(AttemptLog.rank))}  # noqa: C416

    def read(self, attempt: Attempt, rank: int) -> str:
        """Return what is kept of a rank's log, with a line where something is left out."""
        query = select(AttemptLog.start, AttemptLog.stop, AttemptLog.text)
        query = query.where(AttemptLog.attempt_id == attempt.id, AttemptLog.rank == rank).order_by(AttemptLog.start)
        parts, expected = [], 0
        for start, stop, text in self._session.execute(query):
            if start > expected:
                parts.append(_left_out(start - expected))
            parts.append(text)
            expected = stop
        return "".join(parts)

    def sizes(self, attempt: Attempt) -> dict[int, int]:
        """Return how many bytes of UTF-8 `read` gives of each rank's log, by rank, without reading any text."""
        query = select(AttemptLog.rank, AttemptLog.start, AttemptLog.stop, utf8_bytes(AttemptLog.text))
        query = query.where(AttemptLog.attempt_id == attempt.id).order_by(AttemptLog.rank, AttemptLog.start)
        sizes: dict[int, int] = {}
        expected = 0
        for rank, start, stop, size in self._session.execute(query):
            if rank not in sizes:
                sizes[rank], expected = 0, 0
            if start > expected:
                sizes[rank] += len(_left_out(start - expected))
            sizes[rank] += size
            expected = stop
        return sizes

    def _end(self, attempt: Attempt, rank: int) -> int:
        query = select(func.coalesce(func.max(AttemptLog.stop), 0))
        return self._session.scalars(query.where(AttemptLog.attempt_id == attempt.id, AttemptLog.rank == rank)).one()


def _left_out(count: int) -> str:
    return f"\n[... {count} bytes left out ...]\n"
