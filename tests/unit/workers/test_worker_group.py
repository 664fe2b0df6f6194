"""What the ranks' states mean: decided without Ray."""

import dataclasses
import pickle
from types import SimpleNamespace

import pytest

from muonscope.contract.attempts import Failure, RankFact
from muonscope.contract.status import FailureKind, MomentumUnit, Phase
from workers import worker_group
from workers.attempt import group_facts, group_phases
from workers.failure import RankFailure
from workers.rank import RankFacts, RankResult, WorkerPoll
from workers.train_worker import RankEnd
from workers.worker_group import (
    LAST_WORDS_S,
    SETUP_LIMIT_S,
    SILENT_AFTER_S,
    Failed,
    Finished,
    GoOn,
    RankState,
    WorkerGroup,
    decide,
)

LIMIT_S = 30.0


def poll(steps_done: int = 3, part: int = 1, **changes: object) -> WorkerPoll:
    base = WorkerPoll({Phase.IMPORTED: 1.0}, steps_done, steps_done, part, records=0, shipping_refused=None, facts=None)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def state(
    rank: int, *, answered_at: float = 100.0, moved_at: float = 100.0, polled: WorkerPoll | None = None
) -> RankState:
    return RankState(rank, answered_at, moved_at, polled or poll())


def died(
    rank: int, at: float, kind: FailureKind = FailureKind.WORKER_DIED, *, is_consequence: bool = False
) -> RankState:
    ended = state(rank)
    ended.end(at, failure=RankFailure(Failure(kind=kind, rank=rank, message="gone"), is_consequence))
    return ended


def succeeded(rank: int, at: float = 100.0) -> RankState:
    ended = state(rank)
    ended.end(at, result=RankResult(None, None, {}, first_step=0, records=30))
    return ended


def test_moving_ranks_go_on() -> None:
    assert decide([state(0), state(1)], now=100.1, stall_limit_s=LIMIT_S) == GoOn()


def test_all_ranks_ended_well_is_the_end() -> None:
    assert decide([succeeded(0), succeeded(1)], now=100.1, stall_limit_s=LIMIT_S) == Finished()


def test_one_rank_still_at_work_is_not_the_end() -> None:
    assert decide([succeeded(0), state(1)], now=100.1, stall_limit_s=LIMIT_S) == GoOn()


def test_a_failure_waits_for_the_others_last_words() -> None:
    noticed = died(0, at=100.0, kind=FailureKind.TASK_ERROR, is_consequence=True)

    assert isinstance(decide([noticed, state(1)], now=100.5, stall_limit_s=LIMIT_S), GoOn)
    decision = decide([noticed, died(1, at=100.6)], now=100.7, stall_limit_s=LIMIT_S)

    assert isinstance(decision, Failed)
    assert (decision.failure.kind, decision.failure.rank) == (FailureKind.WORKER_DIED, 1)


def test_last_words_are_not_waited_for_for_ever() -> None:
    decision = decide([state(0), died(1, at=100.0)], now=100.0 + LAST_WORDS_S, stall_limit_s=LIMIT_S)

    assert isinstance(decision, Failed)
    assert decision.failure.rank == 1


def test_a_rank_that_stopped_answering_is_named_when_the_group_stalls() -> None:
    now = 100.0 + LIMIT_S + 1
    waiting, stopped = state(0, answered_at=now), state(1, answered_at=101.0)

    decision = decide([waiting, stopped], now=now, stall_limit_s=LIMIT_S)

    assert isinstance(decision, Failed)
    assert (decision.failure.kind, decision.failure.rank, decision.failure.step) == (FailureKind.WORKER_STALLED, 1, 3)
    assert "silent: rank 1" in decision.failure.message


def test_a_rank_that_answers_but_got_least_far_is_named() -> None:
    now = 100.0 + LIMIT_S + 1
    in_collective = state(0, answered_at=now, polled=poll(steps_done=4, part=3))
    never_came = state(1, answered_at=now, polled=poll(steps_done=4, part=1))

    decision = decide([in_collective, never_came], now=now, stall_limit_s=LIMIT_S)

    assert isinstance(decision, Failed)
    assert decision.failure.rank == 1


def test_no_single_rank_is_accused_when_none_differs() -> None:
    now = 100.0 + LIMIT_S + 1

    decision = decide([state(0, answered_at=now), state(1, answered_at=now)], now=now, stall_limit_s=LIMIT_S)

    assert isinstance(decision, Failed)
    assert decision.failure.rank is None
    assert "silent: rank 0, 1" in decision.failure.message


def test_a_slow_rank_that_moves_within_the_limit_is_left_alone() -> None:
    now = 100.0 + LIMIT_S - 1

    assert isinstance(decide([state(0, answered_at=now)], now=now, stall_limit_s=LIMIT_S), GoOn)


def test_a_group_that_has_not_trained_yet_is_given_more_time_but_not_for_ever() -> None:
    now = 100.0 + LIMIT_S + 1
    importing = state(0, answered_at=now, polled=poll(steps_done=0))

    assert isinstance(decide([importing], now=now, stall_limit_s=LIMIT_S), GoOn)
    decision = decide([importing], now=100.0 + SETUP_LIMIT_S + 1, stall_limit_s=LIMIT_S)

    assert isinstance(decision, Failed)
    assert decision.failure.kind is FailureKind.WORKER_STALLED


def test_silence_is_reported_long_before_the_limit() -> None:
    now = 100.0 + SILENT_AFTER_S + 0.5

    decision = decide([state(0, answered_at=now, moved_at=now), state(1)], now=now, stall_limit_s=LIMIT_S)

    assert decision == GoOn(silent_ranks=(1,))


@pytest.mark.parametrize(
    "change", [{"steps_done": 4}, {"part": 2}, {"phases": {Phase.IMPORTED: 1.0, Phase.INITIALIZED: 2.0}}]
)
def test_any_progress_of_a_rank_is_movement(change: dict[str, object]) -> None:
    rank = state(0)

    rank.answer(poll(), 110.0)
    assert (rank.answered_at, rank.moved_at) == (110.0, 100.0)
    rank.answer(poll(**change), 111.0)  # type: ignore[arg-type]

    assert rank.moved_at == 111.0


def test_a_phase_counts_when_its_last_rank_has_passed_it() -> None:
    first = state(0, polled=poll(phases={Phase.IMPORTED: 1.0, Phase.INITIALIZED: 2.0}))
    second = state(1, polled=poll(phases={Phase.IMPORTED: 1.5}))

    assert group_phases([first, second]) == {Phase.IMPORTED: 1.5}


def test_facts_wait_for_every_rank() -> None:
    assert group_facts([None, None]) == {}


def test_what_a_rank_found_out_is_known_although_it_ended_before_a_poll_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = RankFacts(
        RankFact(rank=0, node="n", pid=1, device="CPU"), {}, "d", [], MomentumUnit.UNSCALED, "i", {}
    )  # fmt: skip
    result = RankResult(None, None, {}, first_step=0, records=4, facts=facts)
    # Ray's two calls, as they answer for a task that is done.
    done = SimpleNamespace(wait=lambda references, timeout: (references, []), get=lambda reference: reference)
    monkeypatch.setattr(worker_group, "ray", done)
    member = worker_group._Member(RankState(0, 100.0, 100.0), run=RankEnd(pickle.dumps(result)))

    object.__new__(WorkerGroup)._take_end(member, 101.0)

    assert member.state.result == result
    assert member.facts == facts
