"""How a rank's end is told, and what becomes of its polls, without a process of its own."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind
from workers import rank as ranks
from workers.fork_client import Surroundings
from workers.rank import Assignment, Rank, RankResult
from workers.spool import Destination, SpoolWriter


def second_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """One that has imported nothing and spools nothing."""
    monkeypatch.setattr(ranks, "_import_heavy", lambda: None)
    spec = RunSpec.model_validate({"task": {"name": "simple_model"}, "world_size": 2, "steps": 1})
    destination = Destination("http://127.0.0.1:9", "run-x-a1", "token", 1)
    assignment = Assignment(spec, 1, destination, 0, tmp_path, {}, tmp_path / "rank-1.log")
    return Rank(assignment, Surroundings.here("127.0.0.1", []))


def ended_by(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankResult:
    """What the actor is told when the run's task ends so."""
    monkeypatch.setattr(Rank, "_build", build)
    return second_rank(tmp_path, monkeypatch).run("127.0.0.1", 9)


def test_a_task_that_leaves_the_program_is_its_own_error_and_no_dead_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: Any) -> None:
        sys.exit("train.bin is not here")

    ended = ended_by(leave, tmp_path, monkeypatch)

    assert ended.failure is not None
    failure = ended.failure.failure
    assert not failure.kind.is_infrastructure
    assert failure.kind is FailureKind.TASK_ERROR
    assert failure.message.startswith("SystemExit: train.bin is not here\n")


def test_a_process_without_a_descriptor_left_answers_polls_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = second_rank(tmp_path, monkeypatch)
    spool = SpoolWriter(tmp_path / "spool", Destination("http://127.0.0.1:9", "run-x-a1", "token", 1))
    rank._state.spool = spool
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # As a task does that opens its files again and again. What is open stays open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        answer = rank.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        spool.close()

    assert (answer.records, answer.shipping_refused) == (0, None)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), subprocess.TimeoutExpired("python", 30)])
def test_a_shipper_that_could_not_be_started_is_started_later(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def start(directory: Path) -> None:
        tries.append(directory)
        if len(tries) == 1:
            raise error
        # Started, and done: with the folder the keeper's work ends.
        directory.rmdir()

    monkeypatch.setattr(ranks, "start_detached", start)
    monkeypatch.setattr(ranks, "SHIPPER_CHECK_S", 0.0)
    spool = tmp_path / "spool"
    spool.mkdir()

    ranks._keep_shipping(spool)

    assert tries == [spool, spool]
