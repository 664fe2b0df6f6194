"""The table of legal transitions, over every pair, through the store that enforces it."""

from collections.abc import Callable
from itertools import product

import pytest

from muonscope.contract.attempts import Failure
from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus
from service.controller.transitions import LEGAL, LEGAL_ATTEMPT
from service.errors import IllegalTransition
from service.store.attempts import AttemptRepository
from service.store.runs import RunRepository
from tests.unit.controller.conftest import Desk

# The shortest way to each status.
_WAYS = {
    RunStatus.QUEUED: (),
    RunStatus.PENDING: (RunStatus.PENDING,),
    RunStatus.RUNNING: (RunStatus.PENDING, RunStatus.RUNNING),
    RunStatus.SUCCEEDED: (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUCCEEDED),
    RunStatus.FAILED: (RunStatus.PENDING, RunStatus.FAILED),
    RunStatus.STOPPED: (RunStatus.STOPPED,),
}


@pytest.mark.parametrize(("origin", "to"), list(product(RunStatus, RunStatus)))
def test_a_run_moves_only_as_the_table_says(desk: Desk, origin: RunStatus, to: RunStatus) -> None:
    uid = desk.submit()
    with desk.database.write() as session:
        runs = RunRepository(session)
        run = runs.get(uid)
        for step in _WAYS[origin]:
            runs.set_status(run, step, legal=LEGAL, who="test", why="way")
        if to in LEGAL[origin]:
            runs.set_status(run, to, legal=LEGAL, who="test", why="pair")
        else:
            with pytest.raises(IllegalTransition):
                runs.set_status(run, to, legal=LEGAL, who="test", why="pair")
    assert desk.status(uid) is (to if to in LEGAL[origin] else origin)


def test_every_change_of_a_run_is_an_event(desk: Desk) -> None:
    uid = desk.submit()
    with desk.database.write() as session:
        runs = RunRepository(session)
        for step in _WAYS[RunStatus.SUCCEEDED]:
            runs.set_status(runs.get(uid), step, legal=LEGAL, who="test", why="way")
    assert desk.events(uid) == [
        ("run_status", None, "queued"),
        ("run_status", "queued", "pending"),
        ("run_status", "pending", "running"),
        ("run_status", "running", "succeeded"),
    ]


@pytest.mark.parametrize(("origin", "to"), list(product(AttemptStatus, AttemptStatus)))
def test_an_attempt_moves_only_as_the_table_says(
    make_desk: Callable[..., Desk], origin: AttemptStatus, to: AttemptStatus
) -> None:
    desk = make_desk()
    uid = desk.submit()
    failure = Failure(kind=FailureKind.JOB_LOST)
    with desk.database.write() as session:
        attempts = AttemptRepository(session)
        attempt = attempts.create(RunRepository(session).get(uid), enrolment_token="t", lease_s=1)
        if origin is not AttemptStatus.PENDING:
            attempts.set_status(attempt, origin, who="test", why="way", failure=failure)
        if to in LEGAL_ATTEMPT[origin]:
            attempts.set_status(attempt, to, who="test", why="pair", failure=failure)
        else:
            with pytest.raises(IllegalTransition):
                attempts.set_status(attempt, to, who="test", why="pair", failure=failure)


def test_both_tables_speak_of_every_status() -> None:
    assert set(LEGAL) == set(RunStatus)
    assert set(LEGAL_ATTEMPT) == set(AttemptStatus)


def test_no_way_leads_out_of_success() -> None:
    assert not LEGAL[RunStatus.SUCCEEDED]
