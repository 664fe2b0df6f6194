"""What a rank says about a step, how it is framed on disk, and how a batch of it crosses the wire.

One place for every encoding of non-finite numbers: `NaN`, `Infinity` and `-Infinity` are values, `None` is
"not measured", and the four stay distinct from the rank to the reader.

Frame (spool, little-endian):   u32 length | u32 crc32(payload) | payload
Payload:                        RECORD struct | u32 n | n float32 momentum norms by parameter index
Batch (HTTP body):              MAGIC | u32 header length | header JSON | zlib(columns)
"""

import json
import math
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final

SCHEMA_VERSION: Final = 1
MAGIC: Final = b"MSCB"
MAX_BATCH_BYTES: Final = 64 * 1024 * 1024
MAX_PARAMETERS: Final = 1_000_000

# Nullable scalars, in wire order: bit i of `present` says that value i was measured. Append only.
SCALARS: Final = (
    "loss_scale_before",
    "loss_scale_after",
    "loss",
    "lr",
    "grad_norm",
    "update_norm",
    "momentum_norm",
    "step_time_s",
)
# Nullable counts, in wire order, after the scalars in `present`.
COUNTS: Final = ("largest_parameter", "nonfinite_parameters", "ns_calls", "tokens")

_RECORD: Final = struct.Struct(f"<QBI{len(SCALARS)}d{len(COUNTS)}q")
_FRAME: Final = struct.Struct("<II")
_COUNT: Final = struct.Struct("<I")
OVERFLOW, DISCARDED = 1, 2
# The batch's columns, as array's type codes and their sizes: step, flags, present, the values, the number of norms.
_CODES: Final = ("Q", "B", "I", *"d" * len(SCALARS), *"q" * len(COUNTS), "I")
_WIDTHS: Final = tuple(array(code).itemsize for code in _CODES)
# Where each stands in a payload: the record's fields without padding, then the number of norms.
_OFFSETS: Final = tuple(accumulate(_WIDTHS, initial=0))[:-1]
_HEAD_BYTES: Final = _RECORD.size + _COUNT.size


class TelemetryError(ValueError):
    """A frame or batch that is not what this schema version writes; the message says what and where."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One attempted optimizer step, exact. `None` means not measured, which is neither zero nor NaN."""

    step: int
    overflow: bool
    discarded: bool
    loss_scale_before: float | None = None
    loss_scale_after: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    update_norm: float | None = None
    momentum_norm: float | None = None
    step_time_s: float | None = None
    largest_parameter: int | None = None
    nonfinite_parameters: int | None = None
    ns_calls: int | None = None
    tokens: int | None = None
    parameter_norms: bytes = b""
    """Momentum norm of every trainable parameter after the step, float32 little-endian; empty: not measured."""


_values_of: Final = attrgetter(*SCALARS, *COUNTS)
_ALL_PRESENT: Final = (1 << len(SCALARS) + len(COUNTS)) - 1
STEP_FIELDS: Final = tuple(field.name for field in fields(StepRecord) if field.name != "parameter_norms")


def encode_record(record: StepRecord) -> bytes:
    """Return the record's payload, without its frame."""
    values: Sequence[Any] = _values_of(record)
    present = _ALL_PRESENT
    if None in values:
        present = sum((value is not None) << index for index, value in enumerate(values))
        values = [0 if value is None else value for value in values]
    flags = record.overflow * OVERFLOW | record.discarded * DISCARDED
    head = _RECORD.pack(record.step, flags, present, *values)
    return head + _COUNT.pack(len(record.parameter_norms) // 4) + record.parameter_norms


def decode_record(payload: bytes) -> StepRecord:
    """Undo `encode_record`; raises TelemetryError for a payload of the wrong size."""
    if len(payload) < _RECORD.size + _COUNT.size:
        raise TelemetryError(f"a step record of {len(payload)} bytes is too short")
    step, flags, present, *values = _RECORD.unpack_from(payload)
    (num_norms,) = _COUNT.unpack_from(payload, _RECORD.size)
    norms = payload[_RECORD.size + _COUNT.size :]
    if len(norms) != 4 * num_norms:
        raise TelemetryError(f"step {step} announces {num_norms} norms and carries {len(norms)} bytes")
    measured = [value if present >> index & 1 else None for index, value in enumerate(values)]
    named = dict(zip(SCALARS + COUNTS, measured, strict=True))
    return StepRecord(step, bool(flags & OVERFLOW), bool(flags & DISCARDED), parameter_norms=norms, **named)


def frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def read_frames(data: bytes) -> tuple[list[bytes], int]:
    """Split a spool's bytes into payloads.

    Returns:
        The complete payloads and the number of bytes they and their frames take: what follows is a tail
        still being written.
    Raises:
        TelemetryError: a complete frame whose checksum is wrong.
    """
    payloads, offset = [], 0
    while offset + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, offset)
        start = offset + _FRAME.size
        if length > MAX_BATCH_BYTES:
            raise TelemetryError(f"the frame at byte {offset} claims {length} bytes")
        if start + length > len(data):
            break
        payload = data[start : start + length]
        if zlib.crc32(payload) != crc:
            raise TelemetryError(f"the frame at byte {offset} fails its checksum")
        payloads.append(payload)
        offset = start + length
    return payloads, offset


def encode_batch(payloads: Sequence[bytes], *, epoch: int, rank: int = 0) -> bytes:
    """Turn spool payloads into one columnar, compressed HTTP body.

    Args:
        payloads: as `read_frames` returns them, in step order.
        epoch: the lease epoch of the attempt that ships them.
        rank: the rank that recorded them.
    """
    heads = b"".join([payload[:_HEAD_BYTES] for payload in payloads])
    if len(heads) != _HEAD_BYTES * len(payloads):
        raise TelemetryError(f"a step record is shorter than {_HEAD_BYTES} bytes")
    columns: list[bytes | bytearray] = [
        _gathered(heads, offset, width) for offset, width in zip(_OFFSETS, _WIDTHS, strict=True)
    ]
    columns.extend([payload[_HEAD_BYTES:] for payload in payloads])
    header = {"schema_version": SCHEMA_VERSION, "epoch": epoch, "rank": rank, "count": len(payloads)}
    text = json.dumps(header, separators=(",", ":")).encode()
    return MAGIC + _COUNT.pack(len(text)) + text + zlib.compress(b"".join(columns), 1)


def _gathered(heads: bytes, offset: int, width: int) -> bytearray:
    """Make one field of all records a column: a byte of all records at a time, not a record at a time."""
    column = bytearray(len(heads) // _HEAD_BYTES * width)
    for byte in range(width):
        column[byte::width] = heads[offset + byte :: _HEAD_BYTES]
    return column


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A decoded batch: what one POST of steps carried, column by column."""

    epoch: int
    rank: int
    steps: "array[int]"
    flags: "array[int]"
    present: "array[int]"
    """Bit i of a record's says that its value i, in wire order, was measured."""
    values: "tuple[array[Any], ...]"
    """The scalars and then the counts, in wire order; 0 where one was not measured."""
    num_norms: "array[int]"
    norms: bytes
    """The norms of all records, one after another."""

    @staticmethod
    def of(records: Sequence[StepRecord], *, epoch: int, rank: int = 0) -> "StepBatch":
        """Make the batch that carries these records."""
        return decode_batch(encode_batch([encode_record(record) for record in records], epoch=epoch, rank=rank))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def records(self) -> list[StepRecord]:
        return list(self._iterate())

    def norms_of(self) -> list[bytes]:
        """Return each record's packed norms; empty where they were not measured."""
        data, ends = self.norms, list(accumulate(self.num_norms, initial=0))
        return [data[4 * start : 4 * end] for start, end in pairwise(ends)]

    def take(self, places: Sequence[int]) -> "StepBatch":
        """Return the records at these places, in this order."""
        norms = self.norms_of()
        return StepBatch(
            self.epoch,
            self.rank,
            _picked(self.steps, places),
            _picked(self.flags, places),
            _picked(self.present, places),
            tuple(_picked(column, places) for column in self.values),
            _picked(self.num_norms, places),
            b"".join([norms[place] for place in places]),
        )

    def _iterate(self) -> Iterator[StepRecord]:
        columns = zip(self.steps, self.flags, self.present, self.norms_of(), *self.values, strict=True)
        for step, flags, present, norms, *values in columns:
            measured = [value if present >> index & 1 else None for index, value in enumerate(values)]
            # Positional, in the order of the dataclass.
            row: list[Any] = [step, bool(flags & OVERFLOW), bool(flags & DISCARDED), *measured, norms]
            yield StepRecord(*row)


def _picked(column: "array[Any]", places: Sequence[int]) -> "array[Any]":
    return array(column.typecode, [column[place] for place in places])


def decode_batch(body: bytes) -> StepBatch:
    """Undo `encode_batch`, trusting nothing.

    Raises:
        TelemetryError: not a batch, another schema version, an inflated size over MAX_BATCH_BYTES, or columns that
            do not add up.
    """
    header, start = _decode_header(body)
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(body[start:], MAX_BATCH_BYTES)
    except zlib.error as error:
        raise TelemetryError(f"the batch's columns do not decompress: {error}") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise TelemetryError(f"the batch is cut off or inflates beyond {MAX_BATCH_BYTES} bytes")
    return _split_columns(header, data)


def _decode_header(body: bytes) -> tuple[dict[str, int], int]:
    if body[:4] != MAGIC or len(body) < 8:
        raise TelemetryError("the body does not begin as a step batch")
    (length,) = _COUNT.unpack_from(body, 4)
    try:
        header = json.loads(body[8 : 8 + length])
        version = header["schema_version"]
        numbers = {key: int(header[key]) for key in ("epoch", "rank", "count")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TelemetryError("the batch header is not valid JSON with schema_version, epoch, rank and count") from error
    if version != SCHEMA_VERSION:
        raise TelemetryError(f"schema_version {version} is not {SCHEMA_VERSION}; upgrade the older side")
    if min(numbers.values()) < 0 or max(numbers.values()) >= 2**31:
        raise TelemetryError(f"the batch header's numbers are out of range: {numbers}")
    return numbers, 8 + length


def _split_columns(header: dict[str, int], data: bytes) -> StepBatch:
    count, width = header["count"], sum(_WIDTHS)
    if len(data) < count * width:
        raise TelemetryError(f"{count} records need {count * width} bytes of columns, the batch has {len(data)}")
    columns: list[array[Any]] = []
    offset = 0
    for code, size in zip(_CODES, _WIDTHS, strict=True):
        columns.append(array(code, data[offset : offset + size * count]))
        offset += size * count
    steps, flags, present, *values, num_norms = columns
    norms = data[offset:]
    if 4 * sum(num_norms) != len(norms):
        raise TelemetryError("the batch's norm columns do not add up to its size")
    return StepBatch(header["epoch"], header["rank"], steps, flags, present, tuple(values), num_norms, norms)


def encode_number(value: float | None) -> float | str | None:
    """Make a number fit for JSON: non-finite ones become the strings NaN, Infinity and -Infinity."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode_number(value: float | str | None) -> float | None:
    """Undo `encode_number`; raises TelemetryError for any other string."""
    if not isinstance(value, str):
        return value
    if value not in ("NaN", "Infinity", "-Infinity"):
        raise TelemetryError(f"{value!r} is not a number; the strings NaN, Infinity and -Infinity are")
    return float(value)


def encode_numbers(values: Iterable[float | None]) -> list[float | str | None]:
    return [encode_number(value) for value in values]
