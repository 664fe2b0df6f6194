"""Torch's locks on the C++ extensions that are being built, and which of them nobody holds any more.

Whoever builds has the lock's file open from the moment it is made until it is removed; its compilers work in the
lock's folder. Whoever waits for it does neither, and waits for ever once the builder was killed.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from workers.environment import user_folder_path

# Whoever looks may look between a lock's making and its builder's appearing.
LOST_BUILD_S: Final = 5.0
# Builders on another machine, or of another user, are not seen from here: age has to tell.
UNSEEN_BUILD_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock as it was found."""

    path: Path
    age_s: float
    is_own: bool
    """Whether it is this user's, whose processes can be looked at."""
    holder: str = ""
    """`pid N (program)` of whoever builds; empty where nobody has the lock open."""
    compilers: tuple[str, ...] = ()
    """What works in its folder beside the holder, and outlives it for a while."""

    @property
    def is_left(self) -> bool:
        """Whether its builder is gone without having removed it."""
        seen = self.holder or self.compilers
        return not seen and self.age_s > (LOST_BUILD_S if self.is_own else UNSEEN_BUILD_S)


def examine_locks(paths: Iterable[Path]) -> list[BuildLock]:
    """Say of each lock who holds it; those that are gone by now are left out."""
    now, found = time.time(), {}
    for path in sorted(set(paths)):
        with suppress(OSError):
            status = path.stat()
            found[path.resolve()] = (path, now - status.st_mtime, status.st_uid == os.getuid())
    holders, compilers = _builders(list(found)) if found else ({}, {})
    return [
        BuildLock(path, age_s, is_own, holders.get(real, ""), tuple(compilers.get(real, ())))
        for real, (path, age_s, is_own) in found.items()
    ]


def remove_left_locks(folder: Path) -> list[Path]:
    """Remove the locks that killed builds left behind, on which every later build would wait for ever.

    One that may not be removed stays: it is in nobody's way who does not build that extension.
    """
    # A folder that somebody named may be shared with other machines, whose builders are not seen.
    is_this_machines = folder.is_relative_to(user_folder_path())
    left = [
        lock.path
        for lock in examine_locks(folder.glob("*/lock"))
        if lock.is_left and (is_this_machines or lock.age_s > UNSEEN_BUILD_S)
    ]
    removed = []
    for path in left:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _builders(locks: list[Path]) -> tuple[dict[Path, str], dict[Path, list[str]]]:
    """Return who has each lock open, and what works in its folder."""
    holders: dict[Path, str] = {}
    compilers: dict[Path, list[str]] = {}
    # Whoever looks may stand in the folder.
    lookers = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    for process in psutil.process_iter():
        # Another user's, or gone by now.
        with suppress(psutil.Error, OSError):
            opened = {file.path for file in process.open_files()}
            words = [process.cwd(), *process.cmdline()]
            said = f"pid {process.pid} ({process.name()})"
            for lock in locks:
                if str(lock) in opened:
                    holders[lock] = said
                elif process.pid not in lookers and any(_is_below(word, lock.parent) for word in words):
                    compilers.setdefault(lock, []).append(said)
    return holders, compilers


def _is_below(word: str, folder: Path) -> bool:
    return word == str(folder) or word.startswith(f"{folder}/")
