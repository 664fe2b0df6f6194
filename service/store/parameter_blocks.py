"""parameter_block: every parameter's momentum norms summed up, so that one parameter's chart reads a small part of all.

A row's norms of all parameters lie together, as they arrive: to read one parameter of a million steps is to read the
whole record. A block is written once the steps after it arrive, in their transaction, and never grows.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from muonscope.contract.telemetry import StepBatch
from service.columns import Floats, Integers, extremes
from service.store.blocks import BLOCK_STEPS, BUCKET_STEPS
from service.store.models import ParameterBlock, Step

PART: Final = 24
"""Parameters a row."""
_BUCKETS: Final = BLOCK_STEPS // BUCKET_STEPS
_BYTES: Final = 4 * 2 * _BUCKETS
_TABLE: Final = Step.__table__

Norms = NDArray[np.float32]


class ParameterBlockRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def append(self, attempt_id: int, expected: int, steps: Integers, batch: StepBatch) -> None:
        """Sum up the blocks that end with these steps, which are stored and follow all others.

        Args:
            attempt_id: whose.
            expected: the step after the last one stored before.
            steps: the batch's.
            batch: what they hold.
        """
        first, stop = min(expected, int(steps[0])) // BLOCK_STEPS, (int(steps[-1]) + 1) // BLOCK_STEPS
        if first >= stop:
            return
        begin = first * BLOCK_STEPS
        # What an earlier batch brought of the block that was open.
        earlier = self._stored(attempt_id, begin, expected) if begin < expected else []
        if not batch.norms and not any(packed for _, packed in earlier):
            return
        norms = [*(packed for _, packed in earlier), *batch.norms_of()]
        self._insert(attempt_id, np.array([*(step for step, _ in earlier), *steps.tolist()]), norms, stop)

    def rebuild(self, attempt_id: int, first: int, last: int, *, before: int) -> None:
        """Sum up anew the blocks of the steps first to last, as far as they end before step `before`."""
        first_block, stop_block = first // BLOCK_STEPS, min(last // BLOCK_STEPS + 1, before // BLOCK_STEPS)
        if first_block >= stop_block:
            return
        self._session.execute(
            delete(ParameterBlock).where(
                ParameterBlock.attempt_id == attempt_id, ParameterBlock.number.between(first_block, stop_block - 1)
            ),
            execution_options={"synchronize_session": False},
        )
        rows = self._stored(attempt_id, first_block * BLOCK_STEPS, stop_block * BLOCK_STEPS)
        self._insert(attempt_id, np.array([step for step, _ in rows]), [norms for _, norms in rows], stop_block)

    def read(self, attempt_id: int, first: int, stop: int, index: int) -> tuple[Integers, Floats]:
        """Return the blocks first <= number < stop that there are of one parameter.

        Returns:
            Their numbers, in order, and (blocks, buckets, 2) extremes.
        """
        part, place = divmod(index, PART)
        wanted = func.substr(ParameterBlock.extremes, place * _BYTES + 1, _BYTES)
        rows = self._session.execute(
            select(ParameterBlock.number, wanted)
            .where(ParameterBlock.attempt_id == attempt_id, ParameterBlock.part == part)
            .where(ParameterBlock.number >= first, ParameterBlock.number < stop)
            .order_by(ParameterBlock.number)
        ).all()
        # A parameter beyond the block's last was not measured there.
        packed = b"".join([bytes(row[1]) or _ABSENT for row in rows])
        pairs = np.frombuffer(packed, "<f4").reshape(-1, _BUCKETS, 2).astype(np.float64)
        return np.array([row[0] for row in rows], np.int64), pairs

    def _stored(self, attempt_id: int, first: int, stop: int) -> Sequence[Any]:
        return self._session.execute(
            select(_TABLE.c.step, _TABLE.c.momentum_norms)
            .where(_TABLE.c.attempt_id == attempt_id, _TABLE.c.rank == 0)
            .where(_TABLE.c.step >= first, _TABLE.c.step < stop)
            .order_by(_TABLE.c.step)
        ).all()

    def _insert(self, attempt_id: int, steps: Integers, norms: Sequence[bytes | None], stop: int) -> None:
        rows = summed_up(attempt_id, steps, norms, stop)
        if rows:
            self._session.execute(insert(ParameterBlock), rows)


_ABSENT: Final = np.full(2 * _BUCKETS, np.nan, "<f4").tobytes()


def summed_up(attempt_id: int, steps: Integers, norms: Sequence[bytes | None], stop: int) -> list[dict[str, Any]]:
    """Return the rows of the blocks that these steps make, those before block `stop`.

    Args:
        attempt_id: whose they are.
        steps: in order, all that there are of their blocks.
        norms: the packed norms of each; empty or None where they were not measured.
        stop: the first block that is not over yet.
    """
    within = int(np.searchsorted(steps, stop * BLOCK_STEPS))
    rows: list[dict[str, Any]] = []
    numbers = steps[:within] // BLOCK_STEPS
    bounds = np.flatnonzero(np.concatenate(([True], np.diff(numbers) != 0, [True]))) if within else np.array([0])
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        matrix = _matrix(norms[begin:end])
        if matrix.shape[1]:
            pairs = _pairs(steps[begin:end], matrix)
            rows += [
                {
                    "attempt_id": attempt_id,
                    "part": first // PART,
                    "number": int(numbers[begin]),
                    "extremes": pairs[first : first + PART].tobytes(),
                }
                for first in range(0, len(pairs), PART)
            ]
    return rows


def _matrix(norms: Sequence[bytes | None]) -> Norms:
    """View packed norms as (steps, parameters); NaN where they were not measured."""
    width = max(len(packed or b"") for packed in norms)
    filler = np.full(width // 4, np.nan, "<f4").tobytes()
    packed = b"".join([(row or b"") + filler[len(row or b"") :] for row in norms])
    return np.frombuffer(packed, "<f4").reshape(len(norms), width // 4)


def _pairs(steps: Integers, matrix: Norms) -> Norms:
    """Return (parameters, buckets, 2) extremes of one block's steps."""
    buckets = steps % BLOCK_STEPS // BUCKET_STEPS
    starts = np.flatnonzero(np.concatenate(([True], np.diff(buckets) != 0)))
    pairs = np.full((matrix.shape[1], _BUCKETS, 2), np.nan, "<f4")
    pairs[:, buckets[starts]] = extremes(np.ascontiguousarray(matrix.T), starts)
    return pairs
