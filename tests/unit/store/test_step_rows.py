import math
from collections.abc import Sequence

from muonscope.contract.telemetry import SCALARS, StepBatch, StepRecord
from service.store.models import Step
from service.store.step_rows import COLUMNS, Row, batch_columns, to_record, to_rows


def _rows(records: Sequence[StepRecord]) -> list[Row]:
    batch = StepBatch.of(records, epoch=1)
    return list(to_rows(7, batch, batch_columns(batch)))


def test_rows_are_the_columns_of_the_table_in_order() -> None:
    assert tuple(column.name for column in Step.__table__.columns) == COLUMNS


def test_the_mask_holds_two_bits_for_each_scalar_in_wire_order() -> None:
    assert len(SCALARS) <= 14, "with three flags the mask fills 31 bits of a block's marks"
    record = StepRecord(0, True, True, loss_scale_before=math.nan, loss_scale_after=math.inf, loss=-math.inf, lr=1.0)
    (row,) = _rows([record])

    assert dict(zip(COLUMNS, row, strict=True))["nonfinite_mask"] == 1 | 2 << 2 | 3 << 4
    assert dict(zip(COLUMNS, row, strict=True))["loss"] is None
    assert to_record(row).loss == -math.inf


def test_what_is_missing_leaves_no_bit() -> None:
    rows = _rows([StepRecord(0, False, False), StepRecord(1, False, False, loss=math.nan)])
    masks = [row[COLUMNS.index("nonfinite_mask")] for row in rows]

    assert masks == [0, 1 << 4]
    assert to_record(rows[0]) == StepRecord(0, False, False)
