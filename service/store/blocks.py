"""block: a long record summed up, so that a chart of a million steps reads two thousand rows.

Kept in the transaction that stores the steps; derived from them, and rebuilt from them where steps come late.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from muonscope.contract.telemetry import COUNTS, SCALARS
from service.columns import Floats, Marks, Outline, StepColumns, extremes, mask_kinds
from service.store.models import Block

BLOCK_STEPS: Final = 480
BUCKET_STEPS: Final = 24
_BUCKETS: Final = BLOCK_STEPS // BUCKET_STEPS
_SERIES_BYTES: Final = _BUCKETS * 2 * 8
_SERIES: Final = (*SCALARS, *COUNTS)
_STORED, _OVERFLOW, _DISCARDED, _KINDS_AT = 1, 2, 4, 3
_SHIFTS: Final = 2 * np.arange(len(SCALARS))

Words = NDArray[np.uint32]


class BlockRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def append(self, attempt_id: int, columns: StepColumns) -> None:
        """Add steps that follow all those that the attempt has stored."""
        number = int(columns.step[0]) // BLOCK_STEPS
        open_block = self._session.execute(
            select(*_COLUMNS).where(Block.attempt_id == attempt_id, Block.number == number)
        ).one_or_none()
        rows = summed_up(attempt_id, columns, open_block)
        if open_block is not None:
            head, rows = rows[0], rows[1:]
            self._session.execute(
                update(Block).where(Block.attempt_id == attempt_id, Block.number == number).values(**head),
                execution_options={"synchronize_session": False},
            )
        if rows:
            self._session.execute(insert(Block), rows)

    def replace(self, attempt_id: int, columns: StepColumns) -> None:
        """Make the blocks of these steps anew; the columns are all that the attempt has stored of those blocks."""
        if not len(columns):
            return
        first, last = int(columns.step[0]) // BLOCK_STEPS, int(columns.step[-1]) // BLOCK_STEPS
        self._session.execute(
            delete(Block).where(Block.attempt_id == attempt_id, Block.number.between(first, last)),
            execution_options={"synchronize_session": False},
        )
        self._session.execute(insert(Block), summed_up(attempt_id, columns, None))

    def read(self, attempt_id: int, first: int, stop: int, names: Sequence[str]) -> Outline:
        """Return the attempt's blocks first <= number < stop."""
        table = Block.__table__.c
        rows = self._session.execute(
            select(table.number, table.first_step, table.last_step, table.extremes, table.marks)
            .where(table.attempt_id == attempt_id, table.number >= first, table.number < stop)
            .order_by(table.number)
        ).all()
        return _outline_of(rows, names)


_COLUMNS: Final = (Block.number, Block.first_step, Block.last_step, Block.extremes, Block.marks)


def summed_up(attempt_id: int, columns: StepColumns, open_block: Any) -> list[dict[str, Any]]:
    """Return the rows of the blocks that these steps make, in order.

    Args:
        attempt_id: whose they are.
        columns: one step or more, with all series.
        open_block: the stored block, a row of `_COLUMNS`, that the first of them belong to and follow.
    """
    steps = columns.step
    values = np.stack([columns.values[name] for name in _SERIES])
    buckets = steps // BUCKET_STEPS
    pairs_before = None
    if open_block is not None:
        pairs_before = _unpacked(open_block.extremes)
        # The bucket that is open goes on: its two extremes are its first two points.
        place = int(open_block.last_step) // BUCKET_STEPS
        values = np.concatenate((pairs_before[:, place % _BUCKETS], values), axis=1)
        buckets = np.concatenate(([place, place], buckets))
    starts = np.flatnonzero(np.concatenate(([True], np.diff(buckets) != 0)))
    pairs = extremes(values, starts)
    numbers, places = np.divmod(buckets[starts], _BUCKETS)
    # Steps may lie millions of blocks apart: there is room for those alone that hold any.
    present, rows = np.unique(numbers, return_inverse=True)
    filled = np.full((len(present), len(_SERIES), _BUCKETS, 2), np.nan)
    if pairs_before is not None:
        filled[0] = pairs_before
    filled[rows, :, places] = pairs.transpose(1, 0, 2)
    marks = np.zeros((len(present), BLOCK_STEPS), np.uint32)
    if open_block is not None:
        marks[0] = _marks_of(open_block.first_step, open_block.last_step, open_block.marks)
    marks[np.searchsorted(present, steps // BLOCK_STEPS), steps % BLOCK_STEPS] = _marked(columns)
    return [_row(attempt_id, int(number), filled[row], marks[row]) for row, number in enumerate(present)]


def _marked(columns: StepColumns) -> Words:
    kinds = np.stack([columns.kinds(name) for name in SCALARS])
    mask = (kinds << _SHIFTS[:, None]).sum(axis=0)
    marks: Words = (
        _STORED + _OVERFLOW * columns.overflow + _DISCARDED * columns.discarded + (mask << _KINDS_AT)
    ).astype(np.uint32)
    return marks


def _row(attempt_id: int, number: int, pairs: Floats, marks: Words) -> dict[str, Any]:
    stored = np.flatnonzero(marks)
    first, last = int(stored[0]), int(stored[-1])
    is_plain = bool((marks[first : last + 1] == _STORED).all())
    return {
        "attempt_id": attempt_id,
        "number": number,
        "first_step": number * BLOCK_STEPS + first,
        "last_step": number * BLOCK_STEPS + last,
        "extremes": pairs.astype("<f8").tobytes(),
        "marks": None if is_plain else zlib.compress(marks.astype("<u4").tobytes(), 1),
    }


def _unpacked(packed: bytes) -> Floats:
    return np.frombuffer(packed, "<f8").reshape(len(_SERIES), _BUCKETS, 2)


def _marks_of(first_step: int, last_step: int, packed: bytes | None) -> Words:
    if packed is not None:
        return np.frombuffer(zlib.decompress(packed), "<u4")
    marks = np.zeros(BLOCK_STEPS, np.uint32)
    marks[first_step % BLOCK_STEPS : last_step % BLOCK_STEPS + 1] = _STORED
    return marks


def _outline_of(rows: Sequence[Any], names: Sequence[str]) -> Outline:
    """Read blocks, rows of `_COLUMNS` in order, as an outline."""
    numbers, firsts, lasts = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    begins = (numbers[:, None] * BLOCK_STEPS + np.arange(_BUCKETS) * BUCKET_STEPS).astype(np.int64)
    first = np.maximum(begins, firsts[:, None]).reshape(-1)
    last = np.minimum(begins + BUCKET_STEPS - 1, lasts[:, None]).reshape(-1)
    values = {name: _pairs_of(rows, name) for name in names}
    kept = np.flatnonzero(first <= last)
    if len(kept) < len(first):
        # Mostly it is the ends alone that are cut: a slice, which copies nothing.
        is_one_piece = kept[-1] - kept[0] + 1 == len(kept)
        chosen = slice(kept[0], kept[-1] + 1) if is_one_piece else kept
        first, last, values = first[chosen], last[chosen], {name: pairs[chosen] for name, pairs in values.items()}
    return Outline(first, last, values, _marked_steps(rows, names))


def _pairs_of(rows: Sequence[Any], name: str) -> Floats:
    """Return one series of blocks as (buckets, 2): of a row's twelve only what is wanted is copied."""
    begin = _SERIES.index(name) * _SERIES_BYTES
    return np.frombuffer(b"".join([row[3][begin : begin + _SERIES_BYTES] for row in rows]), "<f8").reshape(-1, 2)


def _marked_steps(rows: Sequence[Any], names: Sequence[str]) -> Marks:
    marked = [(row[0], zlib.decompress(row[4])) for row in rows if row[4] is not None]
    words = np.frombuffer(b"".join([word for _, word in marked]), "<u4")
    # Of many marked blocks only few steps are not plain: the rest says nothing.
    telling = np.flatnonzero((words & _STORED != 0) & (words != _STORED))
    block, place = np.divmod(telling, BLOCK_STEPS)
    found = words[telling].astype(np.int64)
    masks = found >> _KINDS_AT
    return Marks(
        step=np.array([number for number, _ in marked], np.int64)[block] * BLOCK_STEPS + place,
        overflow=found & _OVERFLOW != 0,
        discarded=found & _DISCARDED != 0,
        kinds={name: mask_kinds(masks, SCALARS.index(name)) for name in names if name in SCALARS},
    )


def outline_of_rows(columns: StepColumns) -> Outline:
    """Sum up rows of steps that no block covers alone, in buckets of the same bounds."""
    starts = np.flatnonzero(np.concatenate(([True], np.diff(columns.step // BUCKET_STEPS) != 0)))
    stops = np.append(starts[1:], len(columns))
    pairs = extremes(np.stack(list(columns.values.values())), starts)
    values = dict(zip(columns.values, pairs, strict=True))
    return Outline(columns.step[starts], columns.step[stops - 1], values, Marks.of(columns))


def joined(parts: Sequence[Outline]) -> Outline:
    """Put outlines of the same series that follow one another together."""
    marks = [part.marks for part in parts]
    return Outline(
        first=np.concatenate([part.first for part in parts]),
        last=np.concatenate([part.last for part in parts]),
        values={name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
        marks=Marks(
            step=np.concatenate([part.step for part in marks]),
            overflow=np.concatenate([part.overflow for part in marks]),
            discarded=np.concatenate([part.discarded for part in marks]),
            kinds={
                name: np.concatenate([part.kinds[name] for part in marks])
                for name in parts[0].values
                if name in SCALARS
            },
        ),
    )
