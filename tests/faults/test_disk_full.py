"""F8: disks that are full, each a real one of a few hundred kilobytes. Mounting them needs root."""

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.faults.test_training_faults import FRESH_DATA, checkpoints
from tests.installation import ENDED, STEADY, Installation
from workers.checkpoint_files import Manifest, complete_folders, verify
from workers.spool import spool_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


class SmallDisk:
    """A folder with a disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, left_bytes: int) -> None:
        free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        self._filler.write_bytes(bytes(max(0, free - left_bytes)))

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], SmallDisk]]:
    with ExitStack() as stack:

        def mount(folder: Path, size_bytes: int) -> SmallDisk:
            folder.mkdir(parents=True, exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
            return SmallDisk(folder)

        yield mount


def test_f8_a_full_disk_under_the_database_refuses_and_harms_nothing_and_passes_when_there_is_room(
    install: Callable[..., Installation], small_disk: Callable[[Path, int], SmallDisk], tmp_path: Path
) -> None:
    disk = small_disk(tmp_path / "disk", 4_000_000)
    store = disk.folder / "muonscope.db"
    one = install(settings={"database_url": f"sqlite:///{store}"})
    one.start()
    one.client.post("/queue/pause")
    disk.fill(100_000)
    acknowledged = set()
    for _ in range(500):
        answer = one.client.post("/runs", json={"notes": "x" * 2_000})
        if answer.status_code != 201:
            break
        acknowledged.add(answer.json()["id"])

    listed = one.client.get("/runs", params={"limit": 1000})
    assert (answer.status_code, bool(answer.headers["retry-after"])) == (503, True), answer.text
    assert "full" in answer.json()["detail"]
    assert {run["id"] for run in listed.json()["runs"]} == acknowledged
    disk.free()
    acknowledged.add(one.submit(world_size=1))
    one.kill()
    with closing(sqlite3.connect(store)) as opened:
        assert opened.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert {uid for (uid,) in opened.execute("SELECT uid FROM run")} == acknowledged


def test_f8_a_full_disk_under_checkpoints_ends_the_run_with_its_reason_and_keeps_the_last_whole_one(
    training: Installation, small_disk: Callable[[Path, int], SmallDisk]
) -> None:
    disk = small_disk(training.home / "checkpoints", 16_000_000)
    run_id = training.submit(steps=4000, task=FRESH_DATA, checkpoint={"every_steps": 100}, **STEADY)
    training.wait(lambda: checkpoints(training, run_id), what="a checkpoint is reported")
    disk.fill(50_000)
    run = training.wait_for(run_id, *ENDED)

    assert (run["status"], run["failure"]["kind"], len(run["attempts"])) == ("failed", "disk_full", 1)
    step, folder = complete_folders(disk.folder / run_id)[-1]
    verify(folder, Manifest.read(folder))
    disk.free()
    training.client.post(f"/runs/{run_id}/retry")
    training.wait_for_ranks(run_id, 2)
    assert training.attempt(run_id)["first_step"] == step
    training.stop(run_id)


def test_f8_a_full_disk_under_the_spool_ends_the_run_with_its_reason_and_loses_no_row(
    training: Installation, small_disk: Callable[[Path, int], SmallDisk], tmp_path: Path
) -> None:
    disk = small_disk(tmp_path / "disk", 65_536)
    training.client.post("/queue/pause")
    run_id = training.submit(steps=1_000_000, **STEADY)
    spool = spool_directory(f"run-{run_id}-a1")
    spool.parent.mkdir(parents=True, exist_ok=True)
    spool.symlink_to(disk.folder)
    training.client.post("/queue/resume")
    run = training.wait_for(run_id, *ENDED)

    assert (run["status"], run["failure"]["kind"], len(run["attempts"])) == ("failed", "disk_full", 1)
    steps = training.steps(run_id)
    assert steps == list(range(run["attempts"][0]["declared_steps"]))
    assert len(steps) > 50
