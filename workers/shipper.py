"""The shipper: a small process beside rank 0 that carries spooled records to the controller.

    python -m workers.shipper DIRECTORY

It reads whole frames from the acknowledged offset on, posts them as one batch, and advances the offset only after a
2xx. Killed anywhere, a new one starts from the offset: the controller takes a repeated record as the same one. It ends
when the writer is gone and all is shipped, or when the controller says that the attempt is over.

`drain` does the same in the caller's process: how the driver ships the last records after the actors are gone.
"""

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from muonscope.contract.telemetry import TelemetryError, encode_batch, read_frames
from workers.controller_client import ControllerClient, Pauses, until_answered
from workers.errors import ControllerAway, ControllerRefused
from workers.spool import (
    FULL,
    SHIPPER_LOCK,
    Destination,
    Shipped,
    SpoolReader,
    hold_lock,
    is_locked,
    is_writer_alive,
    remove_spool,
)

READ_BYTES: Final = 1024 * 1024
POLL_S: Final = 0.05
# How long an orphaned shipper keeps trying, and leaves a drained spool for the driver to read.
ORPHAN_PATIENCE_S: Final = 3600.0
DRAINED_LINGER_S: Final = 60.0

logger = logging.getLogger(__name__)


class Door(Protocol):
    """Where an attempt's messages go in, as `ControllerClient` has it."""

    def post(self, verb: str, body: bytes, content_type: str = ...) -> bytes:
        """Hand over one message and return the answer's body."""

    def close(self) -> None:
        """Let go of whatever is behind it."""


class Shipper:
    """Carries one spool to its destination, a batch at a time."""

    def __init__(self, directory: Path, timeout_s: float = 10.0, door: Door | None = None) -> None:
        """Args: `door` takes the batches; None is the controller that the spool names."""
        self.directory = directory
        self.shipped = Shipped.read(directory)
        self.is_behind = False
        """Whether the last batch was as large as one gets: more is waiting already."""
        self._destination = Destination.read(directory)
        self._reader = SpoolReader(directory)
        self._client = door or ControllerClient(
            self._destination.controller_url, self._destination.attempt_id, self._destination.token, timeout_s
        )

    def ship_once(self) -> int:
        """Ship the next batch and return how many records it held; 0: nothing whole is waiting.

        Raises:
            ControllerAway: the batch is still in the spool.
            ControllerRefused: the controller will not take it; the reason is kept beside the spool.
        """
        offset = self.shipped.offset
        payloads, length = self._next_frames(offset)
        if not payloads:
            return 0
        body = encode_batch(payloads, epoch=self._destination.epoch, rank=self._destination.rank)
        try:
            self._client.post("steps", body, "application/octet-stream")
        except ControllerRefused as refusal:
            self._remember(Shipped(offset, self.shipped.records, str(refusal)))
            raise
        self._remember(Shipped(offset + length, self.shipped.records + len(payloads)))
        self._reader.drop_shipped(self.shipped.offset)
        return len(payloads)

    def close(self) -> None:
        self._reader.close()
        self._client.close()

    def _next_frames(self, offset: int) -> tuple[list[bytes], int]:
        limit = READ_BYTES
        while True:
            data = self._reader.read(offset, limit)
            try:
                payloads, length = read_frames(data)
            except TelemetryError as error:
                self._remember(Shipped(offset, self.shipped.records, f"the spool is damaged: {error}"))
                raise ControllerRefused(str(self.directory), 0, f"the spool is damaged: {error}") from error
            self.is_behind = len(data) == limit
            if payloads or not self.is_behind:
                return payloads, length
            # One frame larger than the read: look further.
            limit *= 4

    def _remember(self, shipped: Shipped) -> None:
        self.shipped = shipped
        try:
            shipped.write(self.directory)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # Whoever comes next ships once more what the controller has, and it takes a repeat as the same.
            logger.warning("no room to note what is shipped: %s", error, extra={"action": "offset_not_kept"})


def ship_until_done(directory: Path) -> None:
    """Ship until the writer is gone and everything is acknowledged, or the controller refuses."""
    try:
        with closing(Shipper(directory)) as shipper:
            is_settled = _ship_while_written(shipper)
    except FileNotFoundError:
        # The driver has settled this spool meanwhile, and removed it.
        return
    if is_settled:
        _leave_to_the_driver(directory)


def _ship_while_written(shipper: Shipper) -> bool:
    """Returns whether an orphan's spool is settled: all acknowledged, or refused for good."""
    pauses = Pauses()
    orphaned_at: float | None = None
    while True:
        # Asked before the read: what a writer wrote before it vanished is then surely in what is read.
        alive = is_writer_alive(shipper.directory)
        orphaned_at = None if alive else orphaned_at or time.monotonic()
        try:
            count = shipper.ship_once()
        except ControllerRefused as refusal:
            # A living writer's driver reads the reason and cleans up. A damaged spool is kept until it is swept away.
            return not alive and refusal.status != 0
        except ControllerAway as away:
            if orphaned_at is not None and time.monotonic() - orphaned_at > ORPHAN_PATIENCE_S:
                return False
            if not shipper.directory.exists():
                # The driver has settled this spool meanwhile, and removed it; what was read of it is still open here.
                return False
            time.sleep(pauses.next(away.retry_after_s))
            continue
        pauses.reset()
        if not count and not alive:
            return True
        if not shipper.is_behind:
            time.sleep(POLL_S)


def drain(directory: Path, patience_s: float, give_up: threading.Event | None = None) -> Shipped:
    """Ship what is left of a spool whose writer is gone, and say how far that came.

    Returns at once when all is acknowledged or refused; after `patience_s`, or once `give_up` is set, otherwise.
    """
    with closing(Shipper(directory, timeout_s=max(0.2, min(10.0, patience_s)))) as shipper:

        def ship_all() -> None:
            while shipper.ship_once():
                continue

        try:
            until_answered(ship_all, patience_s=patience_s, give_up=give_up)
        except (ControllerAway, ControllerRefused) as error:
            logger.warning("the spool is not drained: %s", error, extra={"action": "spool_not_drained"})
        return shipper.shipped


@dataclass(frozen=True, slots=True)
class Settled:
    """What an attempt's spool came to."""

    declared: int
    """Records that its writer appended."""
    shipped: int
    """Records that the controller acknowledged."""
    refused: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.declared == self.shipped


def settle(directory: Path, patience_s: float, give_up: threading.Event | None = None) -> Settled:
    """Drain a spool and count it; an attempt that never opened one has nothing to settle."""
    if not (directory / "destination.json").exists():
        return Settled(0, 0)
    shipped = drain(directory, patience_s, give_up)
    return Settled(count_records(directory), shipped.records, shipped.refused)


def count_records(directory: Path) -> int:
    """Return how many whole records the spool's writer appended."""
    shipped = Shipped.read(directory)
    reader, offset, count, limit = SpoolReader(directory), shipped.offset, shipped.records, READ_BYTES
    while True:
        data = reader.read(offset, limit)
        payloads, length = read_frames(data)
        count, offset = count + len(payloads), offset + length
        if not payloads and len(data) < limit:
            break
        # One frame larger than the read: look further.
        limit = READ_BYTES if payloads else 4 * limit
    reader.close()
    # A shipper that still runs may have removed a segment meanwhile.
    return count if Shipped.read(directory) == shipped else count_records(directory)


def is_shipper_alive(directory: Path) -> bool:
    return is_locked(directory / SHIPPER_LOCK)


def start_detached(directory: Path, module: str = "workers.shipper") -> None:
    """Start a shipper for `directory` that outlives this process; `module` is what runs as one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (directory / "shipper.log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", module, "--detach", str(directory)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
            timeout=30,
        )


def _leave_to_the_driver(directory: Path) -> None:
    """Keep a settled spool for the driver that reads its count and refusal; remove it when no driver came."""
    deadline = time.monotonic() + DRAINED_LINGER_S
    while time.monotonic() < deadline:
        if not directory.exists():
            return
        time.sleep(min(1.0, DRAINED_LINGER_S / 4))
    remove_spool(directory)


def main(work: Callable[[Path], None] = ship_until_done) -> None:
    """Run as `python -m workers.shipper`, or as another module that ships a spool in its own way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--detach", action="store_true", help="leave the parent's process tree first")
    arguments = parser.parse_args()
    # A grandchild belongs to nobody here: neither Ray's clean-up of a worker's children nor a stop of the job ends it.
    if arguments.detach and os.fork():
        os._exit(0)
    os.nice(5)
    try:
        hold_lock(arguments.directory / SHIPPER_LOCK)
    except BlockingIOError:
        # Another shipper is at work here.
        return
    work(arguments.directory)


if __name__ == "__main__":
    main()
