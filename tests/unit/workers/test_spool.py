"""The spool: what was appended is there, whole, for a reader that comes at any time."""

import errno
import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muonscope.contract.telemetry import StepRecord, decode_record, read_frames
from tests.examples import dear
from workers.errors import SpoolFull
from workers.spool import (
    SHIPPER_LOCK,
    Destination,
    Shipped,
    SpoolReader,
    SpoolWriter,
    hold_lock,
    is_writer_alive,
    remove_spool,
    segments,
    spool_directory,
    sweep_spools,
)

DESTINATION = Destination("http://127.0.0.1:1", "run-x-a1", "secret", 1)


def record(step: int, norms: int = 2) -> StepRecord:
    return StepRecord(step, overflow=False, discarded=False, loss=1.0 / (step + 1), parameter_norms=bytes(4 * norms))


def read_all(directory: Path, limit: int) -> list[StepRecord]:
    reader, offset, records = SpoolReader(directory), 0, []
    while data := reader.read(offset, limit):
        payloads, length = read_frames(data)
        if not payloads:
            limit *= 2
            continue
        records += [decode_record(payload) for payload in payloads]
        offset += length
    reader.close()
    return records


@settings(max_examples=dear(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    norms=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    segment_bytes=st.integers(1, 4000),
    limit=st.integers(1, 3000),
)
def test_whatever_is_appended_is_read_back_over_any_segments_and_reads(
    tmp_path_factory: pytest.TempPathFactory, norms: list[int], segment_bytes: int, limit: int
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    writer = SpoolWriter(directory, DESTINATION, segment_bytes)
    written = [record(step, count) for step, count in enumerate(norms)]
    for each in written:
        writer.append(each)
    writer.close()

    assert read_all(directory, limit) == written


def test_a_reader_follows_a_writer_from_segment_to_segment(tmp_path: Path) -> None:
    writer, reader, offset = SpoolWriter(tmp_path, DESTINATION, segment_bytes=150), SpoolReader(tmp_path), 0

    for step in range(8):
        writer.append(record(step))
        payloads, length = read_frames(reader.read(offset, 4096))
        assert [decode_record(payload).step for payload in payloads] == [step]
        offset += length

    assert reader.read(offset, 4096) == b""
    assert len(segments(tmp_path)) > 1
    reader.close()
    writer.close()


def test_segments_that_are_shipped_are_removed_and_the_last_one_stays(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path, DESTINATION, segment_bytes=1), SpoolReader(tmp_path)
    for step in range(3):
        writer.append(record(step))
    third_start = segments(tmp_path)[2][0]

    reader.drop_shipped(third_start)

    assert [start for start, _ in segments(tmp_path)] == [third_start]
    reader.drop_shipped(third_start + 10_000)
    assert len(segments(tmp_path)) == 1
    writer.close()


def test_a_full_disk_leaves_no_half_frame_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SpoolWriter(tmp_path, DESTINATION)
    writer.append(record(0))
    real_write = os.write
    monkeypatch.setattr("workers.spool.os.write", lambda fd, data: real_write(fd, data[:10]))

    with pytest.raises(SpoolFull, match="free some space"):
        writer.append(record(1))

    monkeypatch.undo()
    writer.append(record(2))
    writer.close()
    assert [each.step for each in read_all(tmp_path, 4096)] == [0, 2]


def test_the_lock_tells_whether_the_writer_lives(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, DESTINATION)
    assert is_writer_alive(tmp_path)

    writer.close()

    assert not is_writer_alive(tmp_path)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, DESTINATION)

    with pytest.raises(BlockingIOError):
        SpoolWriter(tmp_path, DESTINATION)

    writer.close()


def test_nobody_else_may_read_the_token_or_the_records(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    SpoolWriter(directory, DESTINATION).close()

    assert {path.stat().st_mode & 0o077 for path in [directory, *directory.iterdir()]} == {0}


@pytest.mark.benchmark
def test_an_append_of_ten_scalars_and_two_hundred_norms_takes_sixty_microseconds_or_less(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, DESTINATION)
    full = StepRecord(
        7, True, True, 65536.0, 32768.0, 1.5, 0.02, 3.0, 0.9, 12.0, 0.01, 3, 0, 10, 4096, parameter_norms=bytes(800)
    )
    times = []
    for _ in range(3000):
        started = time.perf_counter()
        writer.append(full)
        times.append(time.perf_counter() - started)
    writer.close()

    median_us = statistics.median(times) * 1e6
    print(f"median append: {median_us:.1f} us")
    assert median_us <= 60


def test_a_removed_spool_is_gone_although_a_shipper_writes_beside(tmp_path: Path) -> None:
    directory = tmp_path / "run-1-a1"
    for number in range(50):
        directory.mkdir()
        done = threading.Event()

        def keep_writing(done: threading.Event = done, number: int = number) -> None:
            with suppress(FileNotFoundError):
                while not done.is_set():
                    Shipped(number, 0).write(directory)

        shipper = threading.Thread(target=keep_writing)
        shipper.start()
        remove_spool(directory)
        done.set()
        shipper.join()
        assert not directory.exists()
    assert not list(tmp_path.iterdir())


def test_a_new_attempt_sweeps_away_what_superseded_and_abandoned_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.spool.user_folder", lambda: tmp_path)
    writers = {
        name: SpoolWriter(spool_directory(name), DESTINATION)
        for name in ("run-x-a1", "run-x-a2", "run-x-a10", "run-y-a1", "run-z-a1", "run-w-a1")
    }
    for name in ("run-x-a1", "run-x-a2", "run-x-a10", "run-y-a1", "run-z-a1"):
        writers[name].close()
    shipping = hold_lock(spool_directory("run-x-a2") / SHIPPER_LOCK)
    for name in ("run-z-a1", "run-w-a1"):
        for path in (*spool_directory(name).iterdir(), spool_directory(name)):
            os.utime(path, (0, 0))

    # Gone: superseded, and abandoned for more than a day. Kept: one that is being shipped, a later attempt, another
    # run's of today, an old one whose writer lives.
    assert sorted(sweep_spools("run-x-a3")) == ["run-x-a1", "run-z-a1"]
    kept = {path.name for path in (tmp_path / "spool").iterdir()}
    assert kept == {"run-x-a2", "run-x-a10", "run-y-a1", "run-w-a1"}
    os.close(shipping)
    writers["run-w-a1"].close()


def test_a_segment_that_cannot_be_opened_leaves_the_one_before_as_it_is_and_no_other_file_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(tmp_path / "spool", DESTINATION, segment_bytes=1)
    writer.append(record(0))

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.spool.os.open", refuse)
    with pytest.raises(SpoolFull, match="free some space"):
        writer.append(record(1))
    monkeypatch.undo()
    # Whoever opens a file now gets the first number that is free.
    with (tmp_path / "other").open("wb") as other:
        writer.append(record(2))
        assert os.fstat(other.fileno()).st_size == 0
    writer.close()
    assert [each.step for each in read_all(tmp_path / "spool", 4096)] == [0, 2]
