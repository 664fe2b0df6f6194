"""Unmodified releases, installed once into a cache that outlives the session, and what trains under each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.errors import ReleaseUnavailable
from workers.releases import ensure_installed, releases_root

REPOSITORY = Path(__file__).resolve().parents[3]
# A Muonscope home that outlives the tests, for the releases in it.
HOME = Path(os.environ.get("MUONSCOPE_TEST_HOME", "~/.cache/muonscope-tests")).expanduser()

Train = Callable[[str | None, list[dict[str, Any]]], list[Any]]


def installed(version: str) -> Path:
    """Return a release's folder; a machine that cannot install it skips, but for CI, where that is a failure."""
    try:
        return ensure_installed(releases_root(HOME), version)
    except ReleaseUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def train() -> Train:
    """`train(version, specs)` trains each spec under that release; None is the installed DeepSpeed."""

    def run(version: str | None, specs: list[dict[str, Any]]) -> list[Any]:
        front = [] if version is None else [str(installed(version))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*front, str(REPOSITORY)])}
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.releases.ranks"],
            input=json.dumps(specs), capture_output=True, text=True, timeout=120, env=environment, cwd=REPOSITORY,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        results: list[Any] = json.loads(done.stdout)
        for result in results:
            assert "crash" not in result, result["crash"]
        return results

    return run
