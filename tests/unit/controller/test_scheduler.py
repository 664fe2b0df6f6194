"""What starts now and why the rest waits."""

from collections.abc import Iterator
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from service.controller.scheduler import (
    Capacity,
    Limits,
    QueuedRun,
    RunningRun,
    Schedule,
    decide_starts,
)


def decide(
    queued: list[QueuedRun],
    running: list[RunningRun],
    capacity: Capacity | None,
    *,
    smallest: float | None = None,
    limits: Limits | None = None,
    closed: str | None = None,
) -> Schedule:
    """Decide over runs in any order, and fill in why those wait that were not looked at."""
    line = sorted(queued, key=lambda run: (run.rank, run.id))
    found = decide_starts(line, running, capacity, smallest=smallest or 0.0, limits=limits, closed=closed)
    rest = [run for run in line if found.last is None or (run.rank, run.id) > found.last]
    told = {} if found.rest is None else {run.id: found.rest for run in rest}
    assert not told.keys() & found.waiting.keys()
    return Schedule(found.start, found.waiting | told)


def schedule(queued: list[QueuedRun], running: list[RunningRun], gpus: float, *, foreign: float = 0.0) -> Schedule:
    return decide(queued, running, Capacity(gpus, foreign))


def test_runs_start_in_the_order_of_submission_while_they_fit() -> None:
    found = schedule([QueuedRun(2, 1), QueuedRun(1, 1), QueuedRun(3, 1)], [], 2)
    assert found.start == (1, 2)
    assert found.waiting == {3: "needs 1 GPU, 0 free"}


def test_the_smallest_rank_starts_first() -> None:
    assert schedule([QueuedRun(1, 2, rank=5.0), QueuedRun(2, 2, rank=4.0)], [], 2).start == (2,)


def test_a_users_limit_holds_back_that_users_runs_alone() -> None:
    queued = [QueuedRun(2, 1, owner="ann"), QueuedRun(3, 1, owner="bob"), QueuedRun(4, 1, owner="ann")]
    running = [RunningRun(1, 1, owner="ann")]
    limits = Limits(users={"ann": 2})

    found = decide(queued, running, Capacity(8), limits=limits)

    assert found == Schedule((2, 3), {4: "needs 1 GPU, ann holds 2 of at most 2"})


def test_a_run_that_a_limit_holds_back_does_not_hold_the_head_of_the_line() -> None:
    queued = [QueuedRun(2, 4, owner="ann"), QueuedRun(3, 4, owner="bob")]

    found = decide(queued, [], Capacity(4), limits=Limits(users={"ann": 2}))

    assert found == Schedule((3,), {2: "needs 4 GPUs, ann holds 0 of at most 2"})


def test_everybodys_limit_is_for_those_without_their_own() -> None:
    queued = [QueuedRun(1, 4, owner="ann"), QueuedRun(2, 4, owner="bob"), QueuedRun(3, 4)]

    found = decide(queued, [], Capacity(16), limits=Limits(users={"*": 2, "ann": 8}))

    assert found.start == (1,)
    assert found.waiting[3] == "needs 4 GPUs, nobody holds 0 of at most 2"


def test_a_tags_limit_counts_all_runs_that_carry_it() -> None:
    sweep = frozenset({"sweep"})
    queued = [QueuedRun(2, 1, tags=sweep), QueuedRun(3, 1, tags=sweep), QueuedRun(4, 1)]

    found = decide(queued, [RunningRun(1, 1, tags=sweep)], Capacity(8), limits=Limits(tags={"sweep": 2}))

    assert found == Schedule((2, 4), {3: "needs 1 GPU, tag sweep holds 2 of at most 2"})


def test_a_closed_queue_starts_nothing_and_says_why() -> None:
    found = decide([QueuedRun(1, 1)], [], Capacity(8), closed="the queue is paused, by ann")

    assert found == Schedule((), {1: "the queue is paused, by ann"})


def test_a_run_that_does_not_fit_says_what_it_needs() -> None:
    found = schedule([QueuedRun(1, 4)], [RunningRun(0, 2)], 4)
    assert found == Schedule((), {1: "needs 4 GPUs, 2 free"})


def test_small_runs_do_not_pass_a_big_one_that_waits_for_its_gpus() -> None:
    found = schedule([QueuedRun(1, 4), QueuedRun(2, 1)], [RunningRun(0, 2)], 4)
    assert found.start == ()
    assert found.waiting[2] == "waits for its turn"


def test_gpus_the_head_of_the_line_will_not_need_stay_open() -> None:
    found = schedule([QueuedRun(2, 8), QueuedRun(3, 1), QueuedRun(4, 1), QueuedRun(5, 1)], [RunningRun(1, 5)], 10)
    assert found.start == (3, 4)
    assert found.waiting == {2: "needs 8 GPUs, 5 free", 5: "waits for its turn"}


def test_gpus_that_come_free_are_kept_for_the_head_of_the_line() -> None:
    # Of 64 runs of one GPU seven have ended; each of the others may be the eighth.
    running = [RunningRun(run, 1) for run in range(1, 58)]
    found = schedule([QueuedRun(100, 8), QueuedRun(101, 1)], running, 64)
    assert found == Schedule((), {100: "needs 8 GPUs, 7 free", 101: "waits for its turn"})


def test_what_the_head_leaves_over_is_the_least_that_any_ends_leave() -> None:
    # Three GPUs are missing: a 4 that ends leaves one over, a 2 with a 2 too, a 2 with a 1 none.
    queued = [QueuedRun(10, 4), QueuedRun(11, 1)]
    four, two, another, one = RunningRun(1, 4), RunningRun(2, 2), RunningRun(3, 2), RunningRun(4, 1)
    assert schedule(queued, [four, two, another], 9).start == (11,)
    assert schedule(queued, [four, two, another, one], 10).start == ()


@given(st.lists(st.integers(1, 8), max_size=8), st.integers(1, 8), st.integers(0, 7), st.integers(1, 8))
def test_no_run_behind_the_head_makes_it_wait_for_one_end_more(
    running: list[int], wanted: int, free: int, behind: int
) -> None:
    """Whichever runs end, the head starts when it would have started without the run behind it."""
    free = min(free, wanted - 1)
    total = sum(running) + free
    held = [RunningRun(number, gpus) for number, gpus in enumerate(running, start=1)]
    found = schedule([QueuedRun(100, wanted), QueuedRun(101, behind)], held, total)

    if 101 in found.start:
        for ended in chain.from_iterable(combinations(running, size) for size in range(len(running) + 1)):
            would_start = free + sum(ended) >= wanted
            assert would_start <= (free - behind + sum(ended) >= wanted)


def test_what_runs_behind_the_head_already_counts_against_the_open_gpus() -> None:
    # Runs 3 and 4 started behind run 2; a third would make it wait for them.
    running = [RunningRun(1, 5), RunningRun(3, 1), RunningRun(4, 1)]
    assert schedule([QueuedRun(2, 8), QueuedRun(5, 1)], running, 10).start == ()


def test_a_run_larger_than_the_cluster_holds_nobody_up() -> None:
    found = schedule([QueuedRun(1, 9), QueuedRun(2, 1)], [], 8)
    assert found.start == (2,)
    assert found.waiting == {1: "needs 9 GPUs, the cluster has 8"}


def test_before_the_first_worker_has_joined_a_run_waits_and_says_so() -> None:
    assert schedule([QueuedRun(1, 2)], [], 0).waiting == {1: "needs 2 GPUs, the cluster has none yet"}


def test_a_pausing_run_holds_nobody_up() -> None:
    found = schedule([QueuedRun(1, 2, pause_s=3.0, attempts=1), QueuedRun(2, 2)], [], 2)
    assert found.start == (2,)
    assert found.waiting == {1: "pauses before attempt 2"}


def test_gpus_of_other_users_are_not_free() -> None:
    assert schedule([QueuedRun(1, 2)], [], 2, foreign=1).waiting == {1: "needs 2 GPUs, 1 free"}


def test_half_gpus_add_up() -> None:
    assert schedule([QueuedRun(1, 2 * 0.5), QueuedRun(2, 10 * 0.1)], [], 2).start == (1, 2)


def test_nothing_starts_while_the_cluster_is_away() -> None:
    found = decide([QueuedRun(1, 1)], [], None)
    assert found == Schedule((), {1: "the Ray cluster is not reachable"})


def test_a_stream_of_small_runs_cannot_starve_a_big_one() -> None:
    """One-GPU runs arrive for ever, two a round, each lasting three rounds; an 8-GPU run joins at round 5."""
    running: dict[int, int] = {}
    queue: dict[int, QueuedRun] = {}
    next_id, big, started_at = 1, None, None
    for round_ in range(60):
        running = {run: left - 1 for run, left in running.items() if left > 1}
        for _ in range(2):
            queue[next_id] = QueuedRun(next_id, 1)
            next_id += 1
        if round_ == 5:
            big, next_id = next_id, next_id + 1
            queue[big] = QueuedRun(big, 8)
        found = schedule(list(queue.values()), [RunningRun(run, 8 if run == big else 1) for run in running], 8)
        for run in found.start:
            del queue[run]
            running[run] = 3
            started_at = round_ if run == big else started_at
    assert started_at is not None
    assert started_at <= 9


gpus = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
queued_runs = st.lists(
    st.builds(
        QueuedRun,
        id=st.integers(1, 10_000),
        gpus=gpus,
        rank=st.floats(-1e6, 2e9),
        pause_s=st.sampled_from([0.0, 0.0, 1.0]),
    ),
    max_size=20,
    unique_by=lambda run: run.id,
)
running_runs = st.lists(
    st.builds(RunningRun, id=st.integers(10_001, 20_000), gpus=gpus, rank=st.floats(-1e6, 2e9)), max_size=6
)


@given(queued_runs, running_runs, st.integers(0, 32))
def test_gpus_are_never_promised_twice(queued: list[QueuedRun], running: list[RunningRun], total: int) -> None:
    found = schedule(queued, running, total)
    by_id = {run.id: run for run in queued}
    held = sum(run.gpus for run in running)
    assert not found.start or held + sum(by_id[run].gpus for run in found.start) <= total + 1e-6


@given(queued_runs, running_runs, st.integers(0, 32))
def test_every_queued_run_starts_or_says_why_not(
    queued: list[QueuedRun], running: list[RunningRun], total: int
) -> None:
    found = schedule(queued, running, total)
    assert {*found.start, *found.waiting} == {run.id for run in queued}
    assert not set(found.start) & set(found.waiting)
    assert all(found.waiting.values())


@given(queued_runs, st.integers(8, 32))
def test_an_idle_cluster_starts_the_first_run_in_line(queued: list[QueuedRun], total: int) -> None:
    ready = [run for run in queued if run.pause_s == 0]
    first = min(ready, key=lambda run: (run.rank, run.id), default=None)
    assert first is None or first.id in schedule(queued, [], total).start


@given(queued_runs, running_runs, st.integers(0, 32))
def test_a_look_that_ends_early_starts_what_a_whole_one_starts(
    queued: list[QueuedRun], running: list[RunningRun], total: int
) -> None:
    whole = schedule(queued, running, total)
    smallest = min((run.gpus for run in queued), default=None)
    short = decide(queued, running, Capacity(total), smallest=smallest)

    assert short.start == whole.start
    # Behind the head of the line a run that is too large or pauses may be told that it waits for its turn.
    own = {run: why for run, why in short.waiting.items() if why != "waits for its turn"}
    assert own.items() <= whole.waiting.items()
    assert short.waiting.keys() == whole.waiting.keys()


def test_nothing_is_looked_at_behind_the_head_of_the_line_once_nothing_can_start() -> None:
    looked_at = []

    def line() -> Iterator[QueuedRun]:
        for number in range(10_000):
            looked_at.append(number)
            yield QueuedRun(number, 8 if number == 5 else 1)

    found = decide_starts(line(), [], Capacity(8), smallest=1)

    assert (found.start, looked_at) == ((0, 1, 2, 3, 4), list(range(6)))
    assert (found.rest, found.last) == ("waits for its turn", (0.0, 5))


def test_as_many_as_were_asked_for_are_told_of_their_own_limit_behind_the_head_of_the_line() -> None:
    line = [QueuedRun(1, 8), *(QueuedRun(number, 1, owner="ann") for number in range(2, 10))]
    limits = Limits(users={"ann": 0})

    found = decide_starts(line, [RunningRun(0, 1)], Capacity(8), smallest=1, limits=limits, look=3)

    refused = "needs 1 GPU, ann holds 0 of at most 0"
    assert found.waiting == {1: "needs 8 GPUs, 7 free", 2: refused, 3: refused}
    assert (found.rest, found.last) == ("waits for its turn", (0.0, 3))


def test_so_many_starts_as_were_asked_for_are_said_first_in_line_first() -> None:
    line = [QueuedRun(number, 1) for number in range(10)]
    found = decide_starts(line, [], Capacity(8), most_starts=3)
    assert (found.start, found.has_more, found.rest) == ((0, 1, 2), True, None)
    # The counter-test: as many as there are.
    assert not decide_starts(line[:2], [], Capacity(8), most_starts=3).has_more
