"""Unmodified releases, installed once into a cache that outlives the session, and what trains under each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """`train(version, specs)` trains each spec under that release; None is the installed DeepSpeed."""
    log = tmp_path_factory.mktemp("releases") / "ranks.log"
    command = [sys.executable, "-m", "tests.integration.releases.ranks"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            cwd=REPOSITORY,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def run(version: str | None, specs: list[dict[str, Any]]) -> list[Any]:
            folder = None if version is None else str(installed(version))
            orders.write(json.dumps({"folder": folder, "specs": specs}) + "\n")
            orders.flush()
            answer = answers.readline()
            assert answer, log.read_text()[-3000:]
            results: list[Any] = json.loads(answer)
            for result in results:
                assert "crash" not in result, result["crash"] + log.read_text()[-3000:]
            return results

        yield run
        orders.close()
        process.wait(60)
