"""The command as a process of its own, typed in a folder that holds a spec."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.installation import REPOSITORY


class Shell:
    """Where somebody types: a folder with their spec."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MUONSCOPE_", "RAY_"))}
        self.environment = {**kept, "PYTHONPATH": str(REPOSITORY), **environment}

    def start(self, *words: str, spec: dict[str, Any] | None = None) -> "subprocess.Popen[str]":
        if spec is not None:
            (self.folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", "muonscope.cli.main", *words], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *words: str, spec: dict[str, Any] | None = None) -> tuple[int, str]:
        """Type a command; returns its exit code and what it printed."""
        process = self.start(*words, spec=spec)
        printed, _ = process.communicate(timeout=400)
        return process.returncode, printed

    def interrupt_once_it_trains(self, *words: str, spec: dict[str, Any]) -> tuple[int, str]:
        """Type a command that follows a run, and Ctrl-C after the run's first steps."""
        process = self.start(*words, spec=spec)
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if "running, step" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=180)
        return process.returncode, printed + rest
