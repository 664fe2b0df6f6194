"""What a run leaves behind, by name and never by path."""

import hashlib
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest

from muonscope.contract.attempts import AttemptFacts, CheckpointFact, LogPiece
from service.artifacts import list_artifacts
from service.store.attempts import AttemptRepository
from service.store.checkpoints import CheckpointRepository
from service.store.logs import LogRepository
from service.store.runs import RunRepository
from service.store.session import Database
from tests.unit.service.test_runs import wait_for_status

PAYLOADS = ("../muonscope.db", "..%2fmuonscope.db", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "spec.json%00", "a%5c..")


def write_checkpoint(home: Path, run_id: str, step: int) -> CheckpointFact:
    folder = home / "checkpoints" / run_id / f"step-{step:08d}"
    (folder / "state").mkdir(parents=True)
    weights = b"weights" * 300
    (folder / "state" / "weights.pt").write_bytes(weights)
    files = {"state/weights.pt": {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    return CheckpointFact(step=step, total_bytes=len(weights), manifest_sha256=digest)


@pytest.fixture
def run_id(client: httpx.Client, tmp_path: Path) -> str:
    """A run whose first attempt has said and printed something and left a checkpoint."""
    uid: str = client.post("/runs", json={"name": "left behind"}).json()["id"]
    wait_for_status(client, uid, "pending")
    database = Database(f"sqlite:///{tmp_path / 'muonscope.db'}")
    with database.write() as session:
        attempts = AttemptRepository(session)
        attempt = attempts.get(f"run-{uid}-a1")
        attempts.add_facts(attempt, AttemptFacts(environment={"torch": "2"}, resolved_ds_config={"zero": {"stage": 1}}))
        LogRepository(session).append(attempt, LogPiece(rank=0, start=0, stop=6, text="hello\n"))
        CheckpointRepository(session).replace(attempt, [write_checkpoint(tmp_path, uid, 20)])
    database.dispose()
    return uid


def listed(client: httpx.Client, run_id: str) -> dict[str, dict[str, Any]]:
    answer = client.get(f"/runs/{run_id}/artifacts").json()
    return {artifact["name"]: artifact for artifact in answer["artifacts"]}


def test_all_that_a_run_leaves_is_listed_and_can_be_read(client: httpx.Client, run_id: str) -> None:
    found = listed(client, run_id)

    assert {name: artifact["kind"] for name, artifact in found.items()} == {
        "spec.json": "spec",
        "attempt-1/ds_config.json": "resolved_config",
        "attempt-1/environment.json": "environment",
        "attempt-1/rank-0.log": "log",
        "checkpoint-00000020.tar": "checkpoint",
    }
    assert client.get(found["spec.json"]["url"]).json()["name"] == "left behind"
    assert client.get(found["attempt-1/ds_config.json"]["url"]).json() == {"zero": {"stage": 1}}
    log = client.get(found["attempt-1/rank-0.log"]["url"])
    assert (log.text, log.headers["content-type"]) == ("hello\n", "text/plain; charset=utf-8")
    assert log.headers["content-disposition"] == 'attachment; filename="rank-0.log"'
    assert client.get(f"/runs/{run_id}/logs?rank=0").text == "hello\n"


def test_to_list_logs_is_not_to_read_them(client: httpx.Client, run_id: str, tmp_path: Path) -> None:
    size, count = 65_000, 64
    database = Database(f"sqlite:///{tmp_path / 'muonscope.db'}")
    with database.write() as session:
        attempt = AttemptRepository(session).get(f"run-{run_id}-a1")
        for place in range(count):
            start = 6 + size * place
            text = "x" * (size - 1) + "\n"
            LogRepository(session).append(attempt, LogPiece(rank=0, start=start, stop=start + size, text=text))

    with database.read() as session:
        run = RunRepository(session).get(run_id)
        tracemalloc.start()
        try:
            found = {artifact.name: artifact for artifact in list_artifacts(session, run, None)}
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    database.dispose()

    log = client.get(f"/runs/{run_id}/artifacts/attempt-1/rank-0.log").content
    assert found["attempt-1/rank-0.log"].total_bytes == len(log) > 1024 * 1024
    # Measured: 0.1 MB.
    assert peak < len(log) / 2


def test_a_checkpoint_comes_as_an_archive_of_what_its_manifest_names(
    client: httpx.Client, run_id: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints" / run_id / "step-00000020"
    (folder / "planted").write_text("nobody wrote this down")

    content = client.get(f"/runs/{run_id}/artifacts/checkpoint-00000020.tar").content

    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = archive.getnames()
        weights = archive.extractfile("checkpoint-00000020/state/weights.pt")
        assert weights is not None
        assert weights.read() == (folder / "state" / "weights.pt").read_bytes()
    assert names == ["checkpoint-00000020/manifest.json", "checkpoint-00000020/state/weights.pt"]


def test_a_checkpoint_that_was_changed_is_refused_with_the_reason(
    client: httpx.Client, run_id: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints" / run_id / "step-00000020"
    url = f"/runs/{run_id}/artifacts/checkpoint-00000020.tar"
    weights = folder / "state" / "weights.pt"
    secret = tmp_path / "secret"
    secret.write_bytes(weights.read_bytes())

    weights.unlink()
    weights.symlink_to(secret)
    linked = client.get(url)
    (folder / "manifest.json").write_text("{}")
    other = client.get(url)

    assert (linked.status_code, "leads out of it" in linked.json()["detail"]) == (409, True)
    assert (other.status_code, "not the one that was reported" in other.json()["detail"]) == (409, True)


def test_a_name_is_looked_up_and_never_a_path(client: httpx.Client, run_id: str) -> None:
    for payload in PAYLOADS:
        answer = client.get(httpx.URL(f"{client.base_url}/runs/{run_id}/artifacts/{payload}"))

        assert answer.status_code in (404, 422), payload
        assert b"SQLite" not in answer.content, payload
        assert b"root:" not in answer.content, payload
