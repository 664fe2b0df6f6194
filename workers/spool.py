"""The node-local spool: rank 0 appends a frame a step, the shipper tails it.

A directory per attempt, readable by its owner only:

    frames-<first offset>   segments of frames (`muonscope.contract.telemetry`), appended to by one writer
    shipped.json            how far the controller has acknowledged, replaced atomically
    destination.json        controller, attempt, token, epoch, rank
    writer.lock             locked while the writer lives: a free lock and no new bytes mean that none will come
    shipper.lock            locked while a shipper process works on this spool

Offsets count bytes over all segments; a shipped segment that has a successor is removed. An append is one `write`
without a buffer of ours, so what was appended survives the death of the process.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

from muonscope.contract.telemetry import StepRecord, encode_record, frame
from workers.environment import user_folder
from workers.errors import SpoolFull

SEGMENT_BYTES: Final = 64 * 1024 * 1024
WRITER_LOCK: Final = "writer.lock"
SHIPPER_LOCK: Final = "shipper.lock"
# No controller that is away for so long takes an attempt's records when it is back: its lease has run out.
ABANDONED_S: Final = 86400.0
_SEGMENT_NAME: Final = re.compile(r"frames-(\d{20})")
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def spool_directory(attempt_id: str) -> Path:
    """Return where this node keeps the spool of an attempt."""
    return user_folder() / "spool" / re.sub(r"[^\w.-]", "_", attempt_id)


def remove_spool(directory: Path) -> None:
    """Remove a spool that is settled; a shipper that still works on it finds it gone as a whole."""
    # Under its own name, the shipper could put a file back while the others are being removed.
    doomed = directory.with_name(f".{directory.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep_spools(attempt_id: str) -> list[str]:
    """Remove what other attempts left on this node, now that `attempt_id` begins; returns the names of the removed.

    Each holds its attempt's token. Left alone are those that a writer or a shipper still works on, and those of other
    runs that were touched within the last day: the controller may only be away, and their records are not shipped.
    Earlier attempts of the same run are superseded: nobody takes their records any more.
    """
    run, _, number = attempt_id.rpartition("-a")
    removed = []
    for directory in spool_directory(attempt_id).parent.glob("run-*"):
        other, _, earlier = directory.name.rpartition("-a")
        is_superseded = other == run and earlier.isdecimal() and number.isdecimal() and int(earlier) < int(number)
        if not is_superseded and not _is_old(directory):
            continue
        if any(is_locked(directory / lock) for lock in (WRITER_LOCK, SHIPPER_LOCK)):
            continue
        remove_spool(directory)
        removed.append(directory.name)
    return removed


def _is_old(directory: Path) -> bool:
    try:
        touched = [path.stat().st_mtime for path in (directory, *directory.iterdir())]
    except FileNotFoundError:
        return False
    return time.time() - max(touched) > ABANDONED_S


@dataclass(frozen=True, slots=True)
class Destination:
    """Whom a spool's records go to."""

    controller_url: str
    attempt_id: str
    token: str
    epoch: int
    rank: int = 0

    @classmethod
    def read(cls, directory: Path) -> Self:
        return cls(**json.loads((directory / "destination.json").read_text()))


@dataclass(frozen=True, slots=True)
class Shipped:
    """What the controller has acknowledged of a spool."""

    offset: int = 0
    records: int = 0
    refused: str | None = None
    """Why the controller will take no more, if it said so."""

    @classmethod
    def read(cls, directory: Path) -> Self:
        try:
            return cls(**json.loads((directory / "shipped.json").read_text()))
        except FileNotFoundError:
            return cls()

    def write(self, directory: Path) -> None:
        replace_text(directory / "shipped.json", json.dumps(asdict(self)))


def replace_text(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it; for the owner's eyes only."""
    # Two shippers may write at once, each with a file of its own.
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.touch(0o600)
    beside.write_text(text)
    beside.replace(path)


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Return the segments as (first offset, path), in order."""
    matches = ((_SEGMENT_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def is_locked(path: Path) -> bool:
    """Whether some process holds this lock file; False when it is not there."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def hold_lock(path: Path) -> int:
    """Lock `path` until this process ends or the returned descriptor is closed; BlockingIOError when it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def is_writer_alive(directory: Path) -> bool:
    """Whether the spool's writer still holds it: if not, nothing more will come."""
    return is_locked(directory / WRITER_LOCK)


class SpoolWriter:
    """Appends step records to an attempt's spool. One writer a spool."""

    def __init__(self, directory: Path, destination: Destination, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self.records = 0
        self._segment_bytes = segment_bytes
        self._offset = 0
        self._descriptor: int | None = None
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(directory / "destination.json", json.dumps(asdict(destination)))
        self._lock = hold_lock(directory / WRITER_LOCK)
        self._open_segment()

    def append(self, record: StepRecord) -> None:
        """Append one record.

        Raises:
            SpoolFull: the disk is full; what was appended before is untouched.
        """
        data = frame(encode_record(record))
        assert self._descriptor is not None
        try:
            if self._offset - self._segment_start >= self._segment_bytes:
                self._open_segment()
            written = os.write(self._descriptor, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # No half frame stays behind: the reader would wait for its rest for ever.
            os.ftruncate(self._descriptor, self._offset - self._segment_start)
            if error.errno in FULL:
                raise SpoolFull(str(self.directory), os.strerror(error.errno)) from error
            raise
        self._offset += len(data)
        self.records += 1

    def close(self) -> None:
        """Let go of the spool: its readers know from then on that nothing more comes."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            # A forked child has the lock as well, and closes nothing.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._descriptor = None

    def _open_segment(self) -> None:
        path = self.directory / f"frames-{self._offset:020d}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # Only now: where there is no new one, the old one's number would soon be some other file's.
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._segment_start = descriptor, self._offset


class SpoolReader:
    """Reads a spool's bytes by offset, over its segments."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._start = 0
        self._descriptor: int | None = None

    def read(self, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes from `offset` on, without crossing a segment's end; empty: nothing there yet."""
        if self._descriptor is None or offset < self._start:
            self._open(offset)
        data = self._pread(offset, limit)
        if not data:
            # Either nothing new, or the writer has gone on to a segment that starts right here.
            self._open(offset)
            data = self._pread(offset, limit)
        return data

    def drop_shipped(self, offset: int) -> None:
        """Remove the segments that end at or before `offset`."""
        starts = segments(self._directory)
        for (_, path), (next_start, _) in pairwise(starts):
            if next_start <= offset:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _pread(self, offset: int, limit: int) -> bytes:
        return b"" if self._descriptor is None else os.pread(self._descriptor, limit, offset - self._start)

    def _open(self, offset: int) -> None:
        self.close()
        holding = [(start, path) for start, path in segments(self._directory) if start <= offset]
        if holding:
            self._start, path = holding[-1]
            self._descriptor = os.open(path, os.O_RDONLY)
