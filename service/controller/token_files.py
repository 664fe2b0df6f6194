"""Enrolment tokens as files: where job and service share a machine, no command line shows the secret.

A command line is everybody's to read, in `ps` and in Ray's Jobs API. The file is its owner's alone; the driver reads it
once and removes it.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

# A job that has not begun by then begins no more; its attempt has ended long before.
_KEPT_S: Final = 24 * 3600.0


class TokenFiles:
    """The files below one folder. Made when the first token is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, submission_id: str, token: str) -> Path:
        """Write an attempt's token and return the file; those that no driver has come for go."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        self._sweep()
        file = self._folder / submission_id
        # Never through a file or link that is there: a job that is submitted again gets a file of its own.
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as output:
            output.write(token)
        return file

    def _sweep(self) -> None:
        oldest_kept = time.time() - _KEPT_S
        for file in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if file.lstat().st_mtime < oldest_kept:
                    file.unlink()
