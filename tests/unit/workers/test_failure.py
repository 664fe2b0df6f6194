"""Exceptions become failure kinds, and of several ranks' failures the cause is chosen."""

import errno

import pytest

from muon_core.errors import LossScaleExhausted, UnsupportedSetup
from muonscope.contract.attempts import Failure
from muonscope.contract.status import FailureKind
from workers.errors import CheckpointUnusable, ConfigRefused, NoProgress, SpoolFull, TaskUnusable, WorkerDied
from workers.failure import RankFailure, classify, describe, root_cause


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LossScaleExhausted(1.0), FailureKind.LOSS_SCALE_EXHAUSTED),
        (UnsupportedSetup("offload", "remove it"), FailureKind.CONFIG_REFUSED),
        (ConfigRefused("no"), FailureKind.CONFIG_REFUSED),
        (TaskUnusable("no"), FailureKind.TASK_ERROR),
        (NoProgress(3, 2), FailureKind.NO_PROGRESS),
        (SpoolFull("/x", "full"), FailureKind.DISK_FULL),
        (OSError(errno.ENOSPC, "No space left on device"), FailureKind.DISK_FULL),
        (CheckpointUnusable("/x", "half"), FailureKind.CHECKPOINT_UNUSABLE),
        (WorkerDied(1, "killed"), FailureKind.WORKER_DIED),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA out of memory"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), FailureKind.OUT_OF_MEMORY),
        (ZeroDivisionError("division by zero"), FailureKind.TASK_ERROR),
        (OSError(errno.ENOENT, "No such file"), FailureKind.TASK_ERROR),
    ],
)
def test_an_exception_has_one_kind(error: BaseException, kind: FailureKind) -> None:
    assert classify(error) is kind


def test_what_nothing_recognizes_takes_the_stage_it_came_from() -> None:
    assert classify(KeyError("x"), default=FailureKind.SETUP_FAILED) is FailureKind.SETUP_FAILED


def test_a_death_by_numbers_accuses_no_rank_and_names_its_step() -> None:
    failure = describe(LossScaleExhausted(1.0), rank=1, step=17).failure

    assert (failure.kind, failure.rank, failure.step) == (FailureKind.LOSS_SCALE_EXHAUSTED, None, 17)
    assert "Traceback" not in failure.message


def test_a_task_error_keeps_its_rank_and_traceback_within_the_limit() -> None:
    try:
        raise ValueError("x" * 30_000)
    except ValueError as error:
        failure = describe(error, rank=1, step=4).failure

    assert (failure.kind, failure.rank, failure.step) == (FailureKind.TASK_ERROR, 1, 4)
    assert len(failure.message) == 20_000


def test_what_a_tasks_own_error_calls_a_step_is_not_taken_for_one_of_the_run() -> None:
    error = KeyError("no such column")
    error.step = "tokenize"  # type: ignore[attr-defined]

    assert describe(error, rank=0, step=4).failure.step == 4
    assert describe(NoProgress(3, 2), rank=0, step=4).failure.step == 3


def test_a_message_that_is_no_text_is_told_all_the_same() -> None:
    # What Python makes of a file's name in another encoding.
    failure = describe(RuntimeError("cannot open /data/caf\udce9.bin"), rank=0, step=4).failure

    assert failure.message.startswith("RuntimeError: cannot open /data/caf\\udce9.bin")
    assert failure.model_dump_json()


def rank_failure(kind: FailureKind, rank: int, *, is_consequence: bool = False) -> RankFailure:
    return RankFailure(Failure(kind=kind, rank=rank, message="m"), is_consequence)


def test_the_rank_that_died_is_the_cause_not_the_peer_that_noticed() -> None:
    noticed = describe(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), rank=0, step=5)

    cause = root_cause({0: noticed, 1: rank_failure(FailureKind.WORKER_DIED, 1)})

    assert noticed.is_consequence
    assert (cause.kind, cause.rank) == (FailureKind.WORKER_DIED, 1)


def test_a_ranks_own_error_outweighs_its_peers_lost_connection() -> None:
    noticed = rank_failure(FailureKind.TASK_ERROR, 0, is_consequence=True)

    assert root_cause({0: noticed, 1: rank_failure(FailureKind.TASK_ERROR, 1)}).rank == 1


def test_when_all_only_lost_a_peer_a_worker_died_somewhere() -> None:
    cause = root_cause({0: rank_failure(FailureKind.TASK_ERROR, 0, is_consequence=True)})

    assert (cause.kind, cause.rank) == (FailureKind.WORKER_DIED, None)


def test_of_equal_failures_the_lowest_rank_speaks() -> None:
    failures = {rank: rank_failure(FailureKind.TASK_ERROR, rank) for rank in (2, 1, 3)}

    assert root_cause(failures).rank == 1


def test_a_message_with_a_files_name_that_is_no_unicode_can_be_sent() -> None:
    failure = describe(RuntimeError("cannot read data-\udcff.bin"), rank=0, step=1).failure

    assert failure.message.startswith("RuntimeError: cannot read data-\\udcff.bin")
    assert failure.model_dump_json()
