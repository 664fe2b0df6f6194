"""Errors cross Ray actors: each must come out of a pickle as it went in."""

import pickle

import pytest

from workers.errors import (
    AttemptSuperseded,
    CheckpointNotShared,
    CheckpointUnusable,
    ConfigRefused,
    ControllerAway,
    ControllerRefused,
    NoProgress,
    ReleaseUnavailable,
    SpoolFull,
    TaskUnusable,
    WorkerDied,
    WorkersError,
    WorkerStalled,
)

EXAMPLES = [
    ControllerAway("http://c", "refused", 3.0),
    ControllerRefused("http://c", 422, "no"),
    AttemptSuperseded("http://c", 409, "epoch 1"),
    ConfigRefused("stage 7"),
    TaskUnusable("no such module"),
    ReleaseUnavailable("0.19.2", "pip ended with 1"),
    NoProgress(12, 5),
    WorkerDied(3, "SIGKILL"),
    WorkerStalled([1, 2], 7, 61.0, 60.0),
    SpoolFull("/tmp/spool", "No space left on device"),
    CheckpointUnusable("/ckpt", "half of it"),
    CheckpointNotShared("/ckpt", [1, 3]),
]


def leaves(kind: type[WorkersError]) -> set[type[WorkersError]]:
    below = {leaf for child in kind.__subclasses__() for leaf in leaves(child)}
    return below | ({kind} if kind is not WorkersError else set())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_fields(error: WorkersError) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_of_the_tree_is_tried_here() -> None:
    assert {type(error) for error in EXAMPLES} == leaves(WorkersError)


def test_a_stall_names_the_silent_ranks_and_the_limit() -> None:
    text = str(WorkerStalled([1, 2], None, 61.4, 60.0))

    assert text == "no new step from any rank in 61 s (limit 60 s), before the first step; silent: rank 1, 2"
