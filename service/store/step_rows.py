"""Between step records and rows of the `step` table, in bulk: one place knows the order and the mask.

A non-finite scalar becomes NULL with two bits in the row's mask; on the way back the bits decide.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np

from muonscope.contract.telemetry import COUNTS, SCALARS, StepRecord
from service.columns import FINITE, StepColumns, kinds_of, mask_kinds, restore

COLUMNS: Final = (
    "attempt_id", "step", "rank", "overflow", "discarded", "nonfinite_mask", *SCALARS, *COUNTS, "momentum_norms",
)  # fmt: skip
KEY_WIDTH: Final = 3

Row = Sequence[Any]

_scalars_of = attrgetter(*SCALARS)
_counts_of = attrgetter(*COUNTS)
_VALUES: Final = {0: None, 1: float("nan"), 2: float("inf"), 3: float("-inf")}
_SHIFTS: Final = 2 * np.arange(len(SCALARS))


def to_rows(attempt_id: int, rank: int, records: Sequence[StepRecord]) -> list[Row]:
    """Return the rows to store, in COLUMNS order."""
    scalars: list[tuple[float | None, ...]] = [_scalars_of(record) for record in records]
    masks = [0] * len(records)
    matrix = np.array(scalars, dtype=np.float64).reshape(len(records), len(SCALARS))
    if not np.isfinite(matrix).all():
        # NaN here is either NaN or not measured: only the objects tell.
        objects = np.array(scalars, dtype=object).reshape(matrix.shape)
        kinds = np.where(objects == None, FINITE, kinds_of(matrix))  # noqa: E711 (element by element)
        if kinds.any():
            objects[kinds != FINITE] = None
            scalars = [tuple(row) for row in objects.tolist()]
            masks = (kinds << _SHIFTS).sum(axis=1).tolist()
    return [
        (attempt_id, record.step, rank, record.overflow, record.discarded, mask, *values, *_counts_of(record),
         record.parameter_norms or None)
        for record, mask, values in zip(records, masks, scalars, strict=True)
    ]  # fmt: skip


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
