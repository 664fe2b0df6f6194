"""A function running in a thread of its own, with its result or error kept for whoever waits."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs a function in a daemon thread at once."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> Result:
        """Wait for the end, then return the result or raise the error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Say whether the function has ended, after at most `wait_s`."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
