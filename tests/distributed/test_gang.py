"""The harness itself: what fails or hangs on one rank is named and ended."""

import os
import time
from collections.abc import Iterator

import pytest

from tests.distributed.gang import CASE_LIMIT_S, Gang, GangFailure


def who_am_i() -> int:
    return int(os.environ["RANK"])


def fail_on(rank: int) -> None:
    if who_am_i() == rank:
        raise ValueError("deliberate")
    time.sleep(3600)


def vanish(rank: int) -> None:
    if who_am_i() == rank:
        os._exit(7)


def hang(rank: int) -> None:
    if who_am_i() == rank:
        time.sleep(3600)


@pytest.fixture(scope="module")
def pair() -> Iterator[Gang]:
    gang = Gang(2, trains=False)
    yield gang
    gang.close()


def test_results_come_by_rank_and_ranks_are_reused(pair: Gang) -> None:
    assert pair.run(who_am_i) == [0, 1]
    pids = pair.run(os.getpid)
    assert pids == pair.run(os.getpid)


def test_a_failure_names_its_rank_and_ends_the_silent_ones(pair: Gang) -> None:
    pair.run(who_am_i)
    started = time.monotonic()
    with pytest.raises(GangFailure, match=r"(?s)rank 0 silent.*rank 1 raised.*ValueError: deliberate"):
        pair.run(fail_on, rank=1)

    # The silent one would keep the case until its limit.
    assert time.monotonic() - started < CASE_LIMIT_S / 2


def test_a_rank_that_dies_is_named_with_its_exit_code(pair: Gang) -> None:
    with pytest.raises(GangFailure, match=r"(?s)rank 0 died\nexit code 7"):
        pair.run(vanish, rank=0)


def test_a_hang_ends_at_the_limit_and_the_next_case_runs(pair: Gang) -> None:
    with pytest.raises(GangFailure, match="rank 1 silent"):
        pair.run(hang, rank=1, timeout_s=2)

    assert pair.run(who_am_i) == [0, 1]
