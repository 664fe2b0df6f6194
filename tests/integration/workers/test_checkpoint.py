"""Two real ranks resume from what they wrote, bit for bit, and from nothing else."""

from pathlib import Path

import pytest

from tests.distributed.gang import Gang
from tests.integration.workers.training_cases import load_error, resume, save_on_disks_of_their_own

SPEC = {
    "optimizer": {"lr": 0.05},
    "steps": 6,
    "checkpoint": {"every_steps": 2, "keep": 2},
    "task": {"name": "simple_model", "fixed_batch": False},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_run_ends_with_the_same_bits(ranks: Gang, tmp_path: Path, stage: int) -> None:
    said = ranks.run(resume, spec={**SPEC, "zero_stage": stage, "steps": 7}, root=str(tmp_path))[0]

    assert said["first_step"] == 6
    assert [record["step"] for record in said["resumed"]["records"]] == [6]
    assert said["resumed"]["records"] == said["whole"]["records"][6:]
    assert said["resumed"]["final_hash"] == said["whole"]["final_hash"]
    assert said["resumed"]["final"] == said["whole"]["final"]


def test_only_the_newest_are_kept_and_nothing_half_written(ranks: Gang, tmp_path: Path) -> None:
    ranks.run(resume, spec=SPEC, root=str(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(ranks: Gang, tmp_path: Path) -> None:
    said = ranks.run(resume, spec=SPEC, root=str(tmp_path), break_step=6)[0]

    assert said["first_step"] == 4
    assert said["resumed"]["final_hash"] == said["whole"]["final_hash"]
    assert said["resumed"]["records"] == said["whole"]["records"][4:]


def test_another_runs_checkpoint_is_refused(ranks: Gang, tmp_path: Path) -> None:
    ranks.run(resume, spec=SPEC, root=str(tmp_path))

    error = ranks.run(load_error, spec={**SPEC, "seed": 9}, root=str(tmp_path))[0]

    assert error is not None
    assert error[0] == "CheckpointUnusable"
    assert "another spec" in error[1]


def test_resuming_without_a_checkpoint_says_so(ranks: Gang, tmp_path: Path) -> None:
    error = ranks.run(load_error, spec=SPEC, root=str(tmp_path))[1]

    assert error is not None
    assert error[0] == "CheckpointUnusable"
    assert "no complete checkpoint" in error[1]


def test_a_folder_that_nodes_do_not_share_is_refused_on_every_rank_before_anything_counts(
    ranks: Gang, tmp_path: Path
) -> None:
    errors = ranks.run(save_on_disks_of_their_own, spec=SPEC, root=str(tmp_path))

    assert [name for name, _ in errors] == ["CheckpointNotShared"] * 2
    assert all("rank 1" in text and "MUONSCOPE_WORKERS_HOME" in text for _, text in errors)
    assert not list(tmp_path.glob("disk-*/step-*"))


def test_discarded_steps_in_a_row_are_counted_across_a_resume(ranks: Gang, tmp_path: Path) -> None:
    faults = [{"kind": "inf", "step": step} for step in range(6)]
    spec = {**SPEC, "faults": faults, "stop_after_discarded_steps": 5}

    said = ranks.run(resume, spec=spec, root=str(tmp_path))[0]

    assert said["whole"]["error"] == said["resumed"]["error"] == "NoProgress"
    assert said["first_step"] == 4
    assert said["resumed"]["attempting"] == said["whole"]["attempting"] == 4
