"""What ranks and driver print, by rank, brought to the controller while they run.

    <home>/logs/<attempt>/rank-0.log     written by the rank's process itself, beneath Python: its last words are there
    <home>/logs/<attempt>/driver.log     the driver's records, and every rank's lines again with the rank before them

Ranks append and the driver reads: whatever kills a rank, what it printed stays. The driver ships what is new, says it
again in its own output, for `ray job logs`, and cuts a file that has grown. The folder is one that
all nodes share, like the checkpoints'.
"""

import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from muonscope.contract.attempts import MAX_LOG_PIECE, LogAccepted, LogPiece
from workers.controller_client import ControllerClient
from workers.errors import ControllerAway, ControllerRefused

LOOK_S: Final = 0.3
# A file that is longer and shipped is begun anew.
CUT_AT_BYTES: Final = 16 * 1024 * 1024
# Of a rank that prints faster than it can be shipped, the middle is passed over.
BEHIND_BYTES: Final = 1024 * 1024
# So much of each rank's output is repeated in the driver's.
REPEATED_BYTES: Final = 1024 * 1024

logger = logging.getLogger(__name__)


def log_folder(home: Path, attempt_id: str) -> Path:
    return home / "logs" / attempt_id


def rank_log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def redirect_output(path: Path) -> None:
    """Have all that this process and its children print go to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Appending: the reader may cut the file, and the next word goes to its new end.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # A file is block-buffered by default: words would come late, and a killed process's never.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


@dataclass(slots=True)
class _Followed:
    """A file and how far it has been shipped."""

    path: Path
    rank: int | None
    base: int = 0
    """Bytes that stood before the file's first one, and were cut."""
    place: int = 0
    """The next byte to ship, counted from the very first."""
    repeated: int = 0

    def read(self) -> LogPiece | None:
        """Return the next piece; None where there is nothing new."""
        try:
            size = self.path.stat().st_size
            if self.base + size - self.place > BEHIND_BYTES:
                self.place = self.base + size - MAX_LOG_PIECE
            with self.path.open("rb") as file:
                file.seek(self.place - self.base)
                data = file.read(MAX_LOG_PIECE)
        except OSError:
            return None
        # Up to the last line's end, where there is one: a character is not cut in two.
        end = data.rfind(b"\n") + 1 or len(data)
        if not end:
            return None
        text = data[:end].decode("utf-8", "replace").replace("\x00", "\ufffd")
        return LogPiece(rank=self.rank, start=self.place, stop=self.place + end, text=text)

    def shipped(self, piece: LogPiece) -> None:
        self.place = piece.stop
        if self.place - self.base < CUT_AT_BYTES:
            return
        try:
            left = self.base + self.path.stat().st_size - self.place
            # A moment in which all of it is shipped comes, unless it grows faster than that.
            if left and self.place - self.base < 2 * CUT_AT_BYTES:
                return
            os.truncate(self.path, 0)
            self.base = self.place
        except OSError as error:
            logger.warning("%s cannot be cut: %s", self.path, error, extra={"action": "log_not_cut"})


class LogShipper:
    """The driver's thread that reads the attempt's logs and sends them."""

    def __init__(self, folder: Path, world_size: int, client: ControllerClient) -> None:
        self._folder, self._client = folder, client
        self._files = [_Followed(rank_log(folder, rank), rank) for rank in range(world_size)]
        self._files.append(_Followed(folder / "driver.log", None))
        self._own: TextIO | None = None
        self._handler: logging.Handler | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)

    def start(self) -> None:
        """Begin to read, and have this process's log records written beside the ranks'."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own = (self._folder / "driver.log").open("a", errors="replace", buffering=1)
        except OSError as error:
            logger.warning("no logs are kept: %s", error, extra={"action": "logs_unwritable"})
            return
        self._handler = logging.StreamHandler(self._own)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self._handler)
        self._thread.start()

    def finish(self, patience_s: float) -> None:
        """Ship what is left, while the attempt may still write; removes the files once all is shipped."""
        self._ending.set()
        if not self._thread.is_alive():
            return
        self._thread.join(patience_s)
        if self._thread.is_alive():
            return
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
        deadline = time.monotonic() + patience_s
        while self._ship_once() and time.monotonic() < deadline:
            continue
        if self._own is not None:
            # What it still holds, a full disk does not take.
            with suppress(OSError):
                self._own.close()
            self._own = None
        self._client.close()
        if all(file.read() is None for file in self._files):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            while self._ship_once() and not self._ending.is_set():
                continue

    def _ship_once(self) -> bool:
        """Send one piece of each file that has one; returns whether any was sent."""
        sent = False
        for file in self._files:
            piece = file.read()
            if piece is None:
                continue
            try:
                answer = self._client.post("logs", piece.model_dump_json().encode())
            except ControllerAway:
                return False
            except ControllerRefused as error:
                logger.debug("logs are not taken: %s", error)
                self._ending.set()
                return False
            LogAccepted.model_validate_json(answer)
            file.shipped(piece)
            self._repeat(file, piece)
            sent = True
        return sent

    def _repeat(self, file: _Followed, piece: LogPiece) -> None:
        """Say a rank's lines again in the driver's own log and output."""
        if file.rank is None or file.repeated >= REPEATED_BYTES:
            return
        file.repeated += piece.stop - piece.start
        lines = piece.text.splitlines()
        if file.repeated >= REPEATED_BYTES:
            lines.append("(the rest is in this rank's own log)")
        text = "".join(f"[rank {file.rank}] {line}\n" for line in lines)
        for output in (sys.stdout, self._own):
            if output is not None:
                encoding = output.encoding or "utf-8"
                # A repetition: where it cannot stand, the rank's own log has been shipped all the same.
                with suppress(OSError):
                    output.write(text.encode(encoding, "replace").decode(encoding))
                    output.flush()
