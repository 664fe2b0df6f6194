"""SIGTERM as Ctrl-C: whoever ends the command, what it started is ended in order."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM while the block runs: `ray job stop`, `timeout` and `make` send it."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C and SIGTERM back while a service is asked to begin something: only its answer says what to stop.

    Yields:
        what ends that, called with the answer at hand: raises KeyboardInterrupt if one came meanwhile. From then on,
        and for whoever asks a second time, both raise it at once.
    """
    came, is_held = False, True

    def hold(_number: int, _frame: Any) -> None:
        nonlocal came
        if came or not is_held:
            raise KeyboardInterrupt
        came = True
        # Not by print: a handler may run in the midst of another one.
        os.write(2, b"\nending once the service has answered; once more ends at once\n")

    def release() -> None:
        nonlocal is_held
        is_held = False
        if came:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield release
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
