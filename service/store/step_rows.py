"""Between telemetry batches, step records and rows of the `step` table, in bulk: one place knows order and mask.

A non-finite scalar becomes NULL with two bits in the row's mask; on the way back the bits decide.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np

from muonscope.contract.telemetry import COUNTS, DISCARDED, OVERFLOW, SCALARS, StepBatch, StepRecord
from service.columns import FINITE, Flags, StepColumns, mask_kinds, restore

COLUMNS: Final = (
    "attempt_id", "step", "rank", "overflow", "discarded", "nonfinite_mask", *SCALARS, *COUNTS, "momentum_norms",
)  # fmt: skip
KEY_WIDTH: Final = 3

Row = Sequence[Any]

SERIES_FIELDS: Final = (*SCALARS, *COUNTS)
_VALUES: Final = {0: None, 1: float("nan"), 2: float("inf"), 3: float("-inf")}
_SHIFTS: Final = 2 * np.arange(len(SCALARS))[:, None]


def batch_columns(batch: StepBatch, attempt: int = 0) -> StepColumns:
    """Return a batch as arrays.

    Args:
        batch: steps below 2**63.
        attempt: the number of the attempt that recorded it.
    """
    present = np.frombuffer(batch.present, np.uint32)
    flags = np.frombuffer(batch.flags, np.uint8)
    values, measured = {}, {}
    for place, (name, column) in enumerate(zip(SERIES_FIELDS, batch.values, strict=True)):
        there = (present >> np.uint32(place) & 1).astype(np.bool_)
        numbers = np.frombuffer(column, np.float64 if name in SCALARS else np.int64)
        values[name], measured[name] = np.where(there, numbers, np.nan), there
    return StepColumns(
        step=np.frombuffer(batch.steps, np.int64),
        attempt=np.full(len(batch), attempt),
        overflow=flags & OVERFLOW != 0,
        discarded=flags & DISCARDED != 0,
        values=values,
        measured=measured,
    )


def to_rows(attempt_id: int, batch: StepBatch, columns: StepColumns) -> Iterator[Row]:
    """Return the rows to store, in COLUMNS order; `columns` are the batch's.

    Column by column, and each row only when it is asked for: this bounds how fast steps can be ingested.
    """
    kinds = np.stack([columns.kinds(name) for name in SCALARS])
    cells = []
    for place, (name, column) in enumerate(zip(SERIES_FIELDS, batch.values, strict=True)):
        kept = columns.measured[name]
        cells.append(_with_nulls(column.tolist(), kept & (kinds[place] == FINITE) if name in SCALARS else kept))
    count = len(batch)
    norms = [packed or None for packed in batch.norms_of()] if batch.norms else repeat(None, count)
    return zip(
        repeat(attempt_id, count), batch.steps, repeat(batch.rank, count), columns.overflow.tolist(),
        columns.discarded.tolist(), (kinds << _SHIFTS).sum(axis=0).tolist(), *cells, norms, strict=True,
    )  # fmt: skip


def _with_nulls(values: list[Any], kept: Flags) -> list[Any]:
    for place in np.flatnonzero(~kept).tolist():
        values[place] = None
    return values


def row_columns(rows: Sequence[Row], attempt: int = 0) -> StepColumns:
    """Return whole rows, in COLUMNS order, as arrays."""
    return to_columns([(row[1], *row[KEY_WIDTH:-1]) for row in rows], SERIES_FIELDS, [attempt] * len(rows))


def to_record(row: Row) -> StepRecord:
    """Return the record that a row in COLUMNS order holds."""
    _, step, _, overflow, discarded, mask, *rest = row
    scalars = rest[: len(SCALARS)]
    if mask:
        scalars = [
            value if (kind := mask >> 2 * place & 3) == FINITE else _VALUES[kind] for place, value in enumerate(scalars)
        ]
    counts = rest[len(SCALARS) : -1]
    return StepRecord(step, bool(overflow), bool(discarded), *[*scalars, *counts, bytes(rest[-1] or b"")])


FLAG_COLUMNS: Final = ("step", "overflow", "discarded", "nonfinite_mask")


def to_columns(rows: Iterable[Row], names: Sequence[str], attempts: Sequence[int]) -> StepColumns:
    """Turn rows of FLAG_COLUMNS and then `names` into arrays.

    Args:
        rows: in step order.
        names: of SCALARS and COUNTS.
        attempts: the number of the attempt that recorded each row.
    """
    columns = list(zip(*rows, strict=True)) or [()] * (len(FLAG_COLUMNS) + len(names))
    masks = np.array(columns[3], np.int64)
    values, measured = {}, {}
    for name, column in zip(names, columns[len(FLAG_COLUMNS) :], strict=True):
        # numpy reads None as NaN.
        stored = np.array(column, np.float64)
        kinds = mask_kinds(masks, SCALARS.index(name)) if name in SCALARS else np.zeros(len(stored), np.int64)
        values[name], measured[name] = restore(stored, kinds)
    return StepColumns(
        step=np.array(columns[0], np.int64),
        attempt=np.array(attempts, np.int64),
        overflow=np.array(columns[1], np.bool_),
        discarded=np.array(columns[2], np.bool_),
        values=values,
        measured=measured,
    )


_NO_NORM: Final = np.array([np.nan], "<f4").tobytes()


def parameter_columns(rows: Sequence[Row], attempts: Sequence[int]) -> StepColumns:
    """Turn rows of step and one packed norm, None or empty where it was not measured, into the column momentum_norm."""
    packed = [row[1] or b"" for row in rows]
    measured = np.array([len(norm) == len(_NO_NORM) for norm in packed], np.bool_)
    values = np.frombuffer(b"".join([norm if len(norm) == len(_NO_NORM) else _NO_NORM for norm in packed]), "<f4")
    plain = np.zeros(len(rows), np.bool_)
    return StepColumns(
        step=np.array([row[0] for row in rows], np.int64),
        attempt=np.array(attempts, np.int64),
        overflow=plain,
        discarded=plain,
        values={"momentum_norm": values.astype(np.float64)},
        measured={"momentum_norm": measured},
    )
