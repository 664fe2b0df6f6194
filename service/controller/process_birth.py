"""When a process began, so that it is told from a later one of its number, whatever is done to the machine's clock.

What the system says in Unix seconds moves with the clock: once that was set, a process that lives looks like another.
"""

from typing import Final

import psutil

_TOLERANCE_S: Final = 1.0
# Seconds since a machine's start stay below it, and Unix seconds, as written by earlier versions, do not.
_FIRST_UNIX_S: Final = 1e9


def birth_of(process: psutil.Process) -> float:
    """Return the seconds from the machine's start to the process's; where it does not say so, Unix seconds.

    Raises:
        psutil.Error: it is gone, or not ours to ask.
    """
    return process.create_time() - psutil.boot_time() if psutil.LINUX else process.create_time()


def was_born(process: psutil.Process, at: float) -> bool:
    """Whether this is the process whose birth was noted; raises as `birth_of`."""
    seen = process.create_time() if at >= _FIRST_UNIX_S else birth_of(process)
    return abs(seen - at) < _TOLERANCE_S
