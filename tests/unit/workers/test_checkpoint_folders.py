"""Which checkpoint is taken: whole, ours, of this run, and none newer than asked for."""

import json
import shutil
from pathlib import Path

import pytest

from muonscope.contract.status import FailureKind
from workers.checkpoint import disk_full_is_said
from workers.checkpoint_files import MANIFEST, Manifest, choose, complete_folders, describe_file, look, verify
from workers.errors import CheckpointUnusable
from workers.failure import classify


def write(root: Path, step: int, *, fingerprint: str = "spec", world_size: int = 2) -> Path:
    folder = root / f"step-{step:08d}"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "weights.pt").write_bytes(bytes(step) + b"weights")
    files = {"state/weights.pt": describe_file(folder / "state" / "weights.pt")}
    (folder / MANIFEST).write_text(Manifest(fingerprint, step, world_size, files).to_json())
    return folder


def chosen(root: Path, resume_step: int = 100) -> int:
    return choose(root, resume_step, fingerprint="spec", world_size=2)[1].step


def test_the_newest_is_taken(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)

    assert chosen(tmp_path) == 30


def test_none_newer_than_the_step_to_resume_at_is_taken(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)

    assert chosen(tmp_path, resume_step=29) == 20


def test_a_folder_still_being_written_is_none(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20).rename(tmp_path / ".step-00000020.partial")

    assert [step for step, _ in complete_folders(tmp_path)] == [10]
    assert chosen(tmp_path) == 10


@pytest.mark.parametrize("damage", ["truncate", "change", "remove", "add", "manifest"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 10)
    newest = write(tmp_path, 20)
    weights = newest / "state" / "weights.pt"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:5])
    elif damage == "change":
        weights.write_bytes(weights.read_bytes()[:-1] + b"X")
    elif damage == "remove":
        weights.unlink()
    elif damage == "add":
        (newest / "state" / "planted.pt").write_bytes(b"pickle")
    else:
        (newest / MANIFEST).write_text("{")

    assert chosen(tmp_path) == 10


def test_a_manifest_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 10)
    outside = tmp_path / "planted.pt"
    outside.write_bytes(b"pickle")
    body = json.loads((folder / MANIFEST).read_text())
    body["files"]["../planted.pt"] = describe_file(outside)
    (folder / MANIFEST).write_text(json.dumps(body))

    with pytest.raises(CheckpointUnusable, match="outside the folder"):
        verify(folder, Manifest.read(folder))


@pytest.mark.parametrize(
    ("changes", "reason"), [({"fingerprint": "x"}, "another spec"), ({"world_size": 4}, "4 ranks")]
)
def test_another_runs_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    write(tmp_path, 10, **changes)  # type: ignore[arg-type]

    with pytest.raises(CheckpointUnusable, match=reason):
        chosen(tmp_path)


def test_an_empty_root_says_that_it_holds_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="no complete checkpoint"):
        chosen(tmp_path / "nowhere")


def test_looking_gives_the_complete_ones_with_their_size_and_manifest(tmp_path: Path) -> None:
    write(tmp_path, 10)
    newest = write(tmp_path, 20)
    (write(tmp_path, 30) / MANIFEST).write_text("{")
    write(tmp_path, 40).rename(tmp_path / ".step-00000040.partial")

    found = look(tmp_path)

    assert [one.step for one in found] == [10, 20]
    assert found[1].total_bytes == (newest / "state" / "weights.pt").stat().st_size
    assert len(found[1].manifest_sha256) == 64


def test_only_a_checkpoint_that_was_reported_is_taken(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    known = {one.step: one.manifest_sha256 for one in look(tmp_path)}
    write(tmp_path, 30)
    planted = tmp_path / "step-00000020" / MANIFEST
    planted.write_text(planted.read_text() + " ")

    assert choose(tmp_path, 100, fingerprint="spec", world_size=2)[1].step == 30
    assert choose(tmp_path, 100, fingerprint="spec", world_size=2, known=known)[1].step == 10
    with pytest.raises(CheckpointUnusable, match="no attempt of this run has reported it"):
        choose(tmp_path, 100, fingerprint="spec", world_size=2, known={})


@pytest.mark.parametrize(("free", "kind"), [(1000, FailureKind.DISK_FULL), (10**12, FailureKind.TASK_ERROR)])
def test_a_failed_write_is_a_full_disk_only_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: FailureKind
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))

    with pytest.raises((OSError, RuntimeError)) as caught, disk_full_is_said(tmp_path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    assert classify(caught.value) is kind
