"""Token buckets, one a caller: so much at once, so much a second, and no more memory than for so many callers."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable


class RateLimiter:
    """Thread-safe. Of more callers than `max_callers` the one not seen for longest is forgotten, and starts anew."""

    def __init__(
        self, *, rate_per_s: float, burst: int, max_callers: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate_per_s, self._burst, self._max_callers = rate_per_s, float(burst), max_callers
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Of each caller: what was left, and when that was."""
        self._lock = threading.Lock()

    def pause(self, caller: str) -> float | None:
        """Take one from the caller's bucket; returns None, or how many seconds until there is one to take."""
        with self._lock:
            now = self._clock()
            left, at = self._buckets.pop(caller, (self._burst, now))
            left = min(self._burst, left + (now - at) * self._rate_per_s)
            wait_s = None if left >= 1.0 else (1.0 - left) / self._rate_per_s
            self._buckets[caller] = (left - 1.0 if wait_s is None else left, now)
            if len(self._buckets) > self._max_callers:
                self._buckets.popitem(last=False)
            return wait_s

    def __len__(self) -> int:
        return len(self._buckets)
