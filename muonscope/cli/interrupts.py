"""SIGTERM as Ctrl-C: whoever ends the command, what it started is ended in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM while the block runs: `ray job stop`, `timeout` and `make` send it."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
