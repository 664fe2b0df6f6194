"""Every 5 s each rank says how busy it, its node and its GPU are, from a thread of its own.

Nothing waits for it: while the controller is away the newest hour of samples is kept, and what fails to be measured
is null. It ends when the controller refuses, as it does once the attempt is over.
"""

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import psutil

from workers.controller_client import ControllerClient
from workers.errors import ControllerAway, ControllerRefused
from workers.spool import Destination

SAMPLE_S: Final = 5.0
KEPT_SAMPLES: Final = 720
MESSAGE_SAMPLES: Final = 200
SHORTEST_S: Final = 0.1
"""The processor's time is counted in hundredths of a second: over less than this its share is noise, mostly 0."""

logger = logging.getLogger(__name__)

Measured = dict[str, float | int | None]


def start(destination: Destination, rank: int, period_s: float = SAMPLE_S) -> "Sampler":
    """Begin to sample this process, as this rank of the attempt."""
    sampler = Sampler(destination, rank, period_s)
    sampler.start()
    return sampler


class Sampler:
    """Measures and sends, from `start` to `stop`."""

    def __init__(self, destination: Destination, rank: int, period_s: float) -> None:
        self._rank, self._period_s = rank, period_s
        self._client = ControllerClient(destination.controller_url, destination.attempt_id, destination.token)
        self._process = psutil.Process()
        self._gpu = _find_gpu()
        self._measured_at = -math.inf
        self._waiting: deque[Measured] = deque(maxlen=KEPT_SAMPLES)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float = 2.0) -> None:
        """Take a last sample, send what is waiting, and end."""
        self._ending.set()
        self._thread.join(timeout=patience_s)

    def _run(self) -> None:
        # What is measured first is the time until here; in this thread, for psutil counts for each one by itself.
        self._processor_load()
        is_over = False
        while not is_over:
            is_over = self._ending.wait(self._period_s)
            self._waiting.append(self._sample())
            try:
                self._send()
            except ControllerAway:
                continue
            except ControllerRefused as refusal:
                logger.info("no more load is taken: %s", refusal, extra={"action": "load_refused"})
                break
        self._client.close()

    def _sample(self) -> Measured:
        return {"rank": self._rank, "at": time.time(), **self._process_load(), **self._gpu()}

    def _processor_load(self) -> Measured:
        """Return the shares of the processor since they were last measured; null, and not measured, too soon after."""
        now = time.monotonic()
        if now - self._measured_at < SHORTEST_S:
            return {"cpu_percent": None, "node_cpu_percent": None}
        self._measured_at = now
        return {"cpu_percent": self._process.cpu_percent(), "node_cpu_percent": psutil.cpu_percent()}

    def _process_load(self) -> Measured:
        memory = psutil.virtual_memory()
        return {
            **self._processor_load(),
            "memory_bytes": self._process.memory_info().rss,
            "node_memory_bytes": memory.total - memory.available,
            "node_memory_total_bytes": memory.total,
        }

    def _send(self) -> None:
        while self._waiting:
            samples = list(self._waiting)[:MESSAGE_SAMPLES]
            self._client.post("load", json.dumps({"samples": samples}).encode())
            for _ in samples:
                self._waiting.popleft()


def _find_gpu() -> Callable[[], Measured]:
    """Return what measures this process's GPU; without one, or without NVIDIA's library, it measures nothing."""
    import pynvml

    # The rank's own device alone is visible to it: by its number on the node, or by its UUID.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        by_number = visible.isdecimal()
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(visible)
        )
    except pynvml.NVMLError:
        return dict

    def measure() -> Measured:
        measured: Measured = {}
        try:
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(handle)
            measured |= {"gpu_memory_bytes": int(memory.used), "gpu_memory_total_bytes": int(memory.total)}
            # A partition of a GPU has memory of its own, and says nothing of its use.
            measured["gpu_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError:
            return measured
        return measured

    return measure
