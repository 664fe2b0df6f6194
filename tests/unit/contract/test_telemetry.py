"""Frames and batches: what goes in comes out, and what is damaged is named."""

import json
import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonscope.contract.telemetry import (
    COUNTS,
    MAX_BATCH_BYTES,
    SCALARS,
    StepRecord,
    TelemetryError,
    decode_batch,
    decode_number,
    decode_record,
    encode_batch,
    encode_number,
    encode_record,
    frame,
    read_frames,
)

floats = st.none() | st.floats(allow_nan=True, allow_infinity=True)
counts = st.none() | st.integers(-(2**63), 2**63 - 1)


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    norms = draw(st.lists(st.floats(width=32, allow_nan=True), max_size=5))
    return StepRecord(
        draw(st.integers(0, 2**63 - 1)),
        draw(st.booleans()),
        draw(st.booleans()),
        *(draw(floats) for _ in SCALARS),
        *(draw(counts) for _ in COUNTS),
        struct.pack(f"<{len(norms)}f", *norms),
    )


def bits(record: StepRecord) -> tuple[object, ...]:
    """Compare floats by what they are, so that NaN equals NaN and 0.0 does not equal -0.0."""
    values = [getattr(record, name) for name in record.__slots__]
    return tuple(struct.pack("<d", value) if isinstance(value, float) else value for value in values)


@given(records())
def test_a_record_survives_its_encoding_bit_for_bit(record: StepRecord) -> None:
    assert bits(decode_record(encode_record(record))) == bits(record)


@given(st.lists(records(), max_size=8), st.integers(0, 2**31 - 1), st.integers(0, 4095))
def test_a_batch_survives_the_wire_bit_for_bit(batch: list[StepRecord], epoch: int, rank: int) -> None:
    decoded = decode_batch(encode_batch([encode_record(record) for record in batch], epoch=epoch, rank=rank))

    assert (decoded.epoch, decoded.rank) == (epoch, rank)
    assert [bits(record) for record in decoded.records] == [bits(record) for record in batch]


@given(st.lists(records(), max_size=4), st.integers(0, 200))
def test_a_tail_still_being_written_is_left_for_later(batch: list[StepRecord], cut: int) -> None:
    whole = b"".join(frame(encode_record(record)) for record in batch)
    tail = frame(encode_record(StepRecord(1, False, False)))[:-1][:cut]

    payloads, used = read_frames(whole + tail)

    assert used == len(whole)
    assert len(payloads) == len(batch)


def test_a_damaged_frame_is_refused_with_its_place() -> None:
    good = frame(encode_record(StepRecord(0, False, False)))
    bad = bytearray(good)
    bad[-1] ^= 1

    with pytest.raises(TelemetryError, match=f"at byte {len(good)} fails its checksum"):
        read_frames(good + bytes(bad))


def test_a_batch_that_inflates_beyond_the_limit_is_refused() -> None:
    header = json.dumps({"schema_version": 1, "epoch": 1, "rank": 0, "count": 1}).encode()
    bomb = zlib.compress(b"\0" * (MAX_BATCH_BYTES + 1))

    with pytest.raises(TelemetryError, match="inflates beyond"):
        decode_batch(b"MSCB" + struct.pack("<I", len(header)) + header + bomb)


@pytest.mark.parametrize("cut", [0, 3, 8, 20, 60])
def test_a_cut_off_batch_is_refused(cut: int) -> None:
    body = encode_batch([encode_record(StepRecord(0, True, True, loss=math.nan))], epoch=1)

    with pytest.raises(TelemetryError):
        decode_batch(body[:cut])


def test_another_schema_version_is_refused_by_name() -> None:
    body = encode_batch([], epoch=1).replace(b'"schema_version":1', b'"schema_version":9')

    with pytest.raises(TelemetryError, match="schema_version 9 is not 1"):
        decode_batch(body)


def test_nan_the_infinities_and_not_measured_stay_distinct_in_json() -> None:
    values = [math.nan, math.inf, -math.inf, None, 0.0]

    encoded = json.loads(json.dumps([encode_number(value) for value in values], allow_nan=False))

    assert encoded == ["NaN", "Infinity", "-Infinity", None, 0.0]
    assert [repr(decode_number(value)) for value in encoded] == [repr(value) for value in values]


def test_a_string_that_is_no_number_is_refused() -> None:
    with pytest.raises(TelemetryError, match="'inf' is not a number"):
        decode_number("inf")
