"""The OpenAPI document against the service on SQLite: requests made from it, hostile ones too, and what it answers.

`positive_data_acceptance` is left out: rules between fields (a rank below the world size, a ds_config that DeepSpeed
takes) stand in no JSON schema, and refusing what breaks them is a promise of its own. `/events` never ends by itself.
"""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving


def examine(client: httpx.Client, folder: Path, *options: str, limit_s: float) -> None:
    document = str(client.base_url).rstrip("/") + "/openapi.json"
    settings = Path(__file__).with_name("schemathesis.toml")
    command: list[str | Path] = [Path(sys.executable).with_name("schemathesis"), "--config-file", settings]
    command += ["run", document, "--checks", "all"]
    command += ["--exclude-checks", "positive_data_acceptance", "--exclude-path-regex", "^/events$", "--no-shrink"]
    command += ["--generation-deterministic", "--continue-on-failure", "--request-timeout", "30", "--warnings", "off"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=limit_s, cwd=folder)

    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2000:]
    assert client.get("/readyz").status_code == 200
    assert client.post("/runs", json={}).status_code in (201, 503), "503: a request has set the queue to drain"


def test_every_operation_answers_as_the_document_says(tmp_path: Path) -> None:
    with serving(tmp_path, FakeLauncher(2.0)) as client:
        examine(client, tmp_path, "--phases", "fuzzing", "--max-examples", "1", limit_s=400)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_every_operation_answers_as_the_document_says_to_hundreds_of_requests(tmp_path: Path) -> None:
    with serving(tmp_path, FakeLauncher(2.0)) as client:
        examine(client, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "5", limit_s=1100)
