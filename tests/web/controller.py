"""The service as users start it: a process of its own, with a local Ray."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from service.serve import bind

_START_S = 120.0
_CPU = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Controller:
    """`muonscope up` as a process of its own, on one port and one store over its restarts."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with bind("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "muonscope.cli.main", "up", "--port", str(self.port), "--gpus", "2"]
        environment = {**os.environ, **_CPU, "MUONSCOPE_HOME": str(self.home)}
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            assert self.process.poll() is None, (self.home / "up.log").read_text()
            assert time.monotonic() < deadline, (self.home / "up.log").read_text()
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.address}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, with_signal: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)
        self.process.wait(60)
