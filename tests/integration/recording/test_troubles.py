"""What goes wrong beside a recorded loop is the record's trouble, and never the loop's."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.recording import loops, troubles
from tests.integration.recording.guide import ended
from tests.integration.recording.test_recording import Gangs


def _to(service: httpx.Client) -> dict[str, Any]:
    return {"url": str(service.base_url)}


def test_a_step_that_somebody_else_stands_in_for_is_theirs_again_after_the_record(
    gang: Gangs, service: httpx.Client
) -> None:
    ((is_theirs, calls),) = gang(1).run(troubles.stood_in_for, record=_to(service))

    assert is_theirs
    assert calls == 2 * loops.STEPS


def test_a_child_that_outlives_the_loop_does_not_keep_its_record_open(gang: Gangs, service: httpx.Client) -> None:
    (run_id,) = gang(1).run(troubles.with_a_forked_child, record={**_to(service), "patience_s": 90.0})

    run = service.get(f"/runs/{run_id}").json()
    assert (run["status"], run["summary"]["steps"]) == ("succeeded", loops.STEPS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_fills_up_ends_the_record_and_not_the_loop(
    gang: Gangs, service: httpx.Client, world_size: int
) -> None:
    whole = gang(world_size).run(loops.loop, optimizer="adam", stage=1)
    full = gang(world_size).run(troubles.on_a_full_disk, steps=3, record=_to(service))

    assert [each["error"] for each in full] == [None] * world_size
    assert [each["hash"] for each in full] == [each["hash"] for each in whole]
    run = ended(service, full[0]["run_id"])
    assert (run["status"], run["failure"]["kind"], run["summary"]["steps"]) == ("failed", "disk_full", 3)
    assert run["failure"]["step"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_alone_is_not_waited_for(gang: Gangs, service: httpx.Client, rank: int) -> None:
    left = gang(2).run(troubles.one_leaves_alone, rank=rank, record=_to(service))

    assert [error for error, _ in left] == ["ZeroDivisionError" if each == rank else None for each in range(2)]
    run = ended(service, left[0][1])
    assert (run["status"], run["summary"]["steps"]) == ("failed" if rank == 0 else "succeeded", loops.STEPS)
    assert run["attempts"][0]["final"] is None


def test_a_record_that_cannot_be_begun_leaves_no_spool(gang: Gangs, tmp_path: Path) -> None:
    (said,) = gang(1).run(
        troubles.without_a_keeper, record={"file": str(tmp_path / "mine.db")}, temporary=str(tmp_path)
    )

    assert said == ("TimeoutExpired", [])
