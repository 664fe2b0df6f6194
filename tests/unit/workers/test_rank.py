"""How a rank's end is told, and what becomes of its polls, without a process of its own."""

import sys
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind
from workers import rank as ranks
from workers.fork_client import Surroundings
from workers.rank import Assignment, Rank, RankResult
from workers.spool import Destination


def ended_by(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankResult:
    """What the actor is told when the run's task ends so."""
    monkeypatch.setattr(ranks, "_import_heavy", lambda: None)
    monkeypatch.setattr(Rank, "_build", build)
    spec = RunSpec.model_validate({"task": {"name": "simple_model"}, "world_size": 2, "steps": 1})
    destination = Destination("http://127.0.0.1:9", "run-x-a1", "token", 1)
    assignment = Assignment(spec, 1, destination, 0, tmp_path, {}, tmp_path / "rank-1.log")
    return Rank(assignment, Surroundings.here("127.0.0.1", [])).run("127.0.0.1", 9)


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
