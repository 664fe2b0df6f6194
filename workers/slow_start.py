"""A word for whoever waits at a terminal: a first step that takes long, and what it may be at."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

AFTER_S: Final = 10.0


class SlowStart:
    """Says once, on standard error, that a block is still under way: a script that sets up no logging shows no log."""

    def __init__(self, text: str, *, after_s: float = AFTER_S) -> None:
        """Say nothing yet.

        Args:
            text: what is said.
            after_s: how long a watched block may take without a word.
        """
        self._text, self._after_s = text, after_s
        self._is_said = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Speak while the block runs, should it take long; the block itself is left alone."""
        timer = threading.Timer(self._after_s, self._say)
        timer.daemon = True
        # Without a thread nothing is said, and the training goes on.
        with contextlib.suppress(RuntimeError):
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _say(self) -> None:
        if self._is_said:
            return
        self._is_said = True
        # A terminal that is gone, or none, is no trouble of the training's.
        with contextlib.suppress(OSError, ValueError):
            print(self._text, file=sys.stderr, flush=True)
