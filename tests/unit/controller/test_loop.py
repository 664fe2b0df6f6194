"""Ticks against a cluster in memory and a real SQLite store."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus
from service.controller.launcher import Job, JobRequest, JobStatus, LauncherStarting, LauncherUnavailable
from service.controller.loop import ControllerLoop
from service.errors import Unavailable
from service.store.attempts import AttemptRepository
from service.store.queue import QueueRepository
from service.store.runs import RunRepository
from tests.unit.controller.conftest import Desk


def first_attempt(uid: str) -> str:
    return f"run-{uid}-a1"


def expire_lease(desk: Desk, submission_id: str) -> None:
    with desk.database.write() as session:
        attempts = AttemptRepository(session)
        attempts.extend_lease(attempts.get(submission_id), lease_s=-1)


# -- starting --------------------------------------------------------------------------------------------------------


def test_a_queued_run_becomes_one_job_with_a_one_use_token(desk: Desk) -> None:
    uid = desk.submit(world_size=2)
    desk.tick()
    request = desk.launcher.requests[first_attempt(uid)]
    attempt = desk.run(uid).attempts[0]
    assert desk.status(uid) is RunStatus.PENDING
    assert request.controller_url == "http://127.0.0.1:8800"
    assert len(request.enrolment_token) >= 40
    assert request.enrolment_token not in repr(request)
    assert request.enrolment_token not in attempt.enrolment_token_hash


def test_the_phases_before_the_driver_are_recorded(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick(2)
    phases = desk.run(uid).attempts[0].phases
    assert phases["submitted"] <= phases["job_submitted"] <= time.time() + 1


def test_a_driver_that_starts_before_rays_answer_is_read_starts_after_its_job_was_submitted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = desk.submit()
    submit, started = desk.launcher.submit, []

    async def answered_late(request: JobRequest) -> None:
        await submit(request)
        started.append(time.time())
        await asyncio.sleep(0.05)

    monkeypatch.setattr(desk.launcher, "submit", answered_late)
    desk.tick(2)

    assert desk.run(uid).attempts[0].phases["job_submitted"] <= started[0]


def test_runs_that_do_not_fit_wait_and_say_why(desk: Desk) -> None:
    first, second = desk.submit(world_size=2), desk.submit(world_size=2)
    desk.tick()
    assert desk.status(first) is RunStatus.PENDING
    assert desk.run(second).waiting_reason == "needs 2 GPUs, 0 free"


def test_a_tick_leaves_to_the_next_one_what_it_has_no_time_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.launcher.gpus = 3.0
    uids = [desk.submit() for _ in range(3)]
    waiting = [desk.submit(world_size=3) for _ in range(250)]
    with monkeypatch.context() as patch:
        # Whatever is done takes sixty milliseconds.
        patch.setattr(desk.loop._planner, "_clock", partial(next, count(0.0, 0.06)))
        for done in (1, 2):
            desk.tick()
            assert [desk.status(uid) for uid in uids].count(RunStatus.PENDING) == done
            assert [desk.run(uid).waiting_reason is not None for uid in waiting].count(True) == 100 * done

    # The counter-test: with time enough all is done at once.
    desk.tick()
    assert {desk.status(uid) for uid in uids} == {RunStatus.PENDING}
    assert all(desk.run(uid).waiting_reason for uid in waiting)


def test_the_next_run_starts_in_the_tick_after_an_outcome(desk: Desk) -> None:
    first, second = desk.submit(world_size=2), desk.submit(world_size=2)
    desk.tick()
    desk.enrol(first_attempt(first))
    desk.report(first_attempt(first), AttemptStatus.SUCCEEDED)
    desk.tick()
    assert desk.status(first) is RunStatus.SUCCEEDED
    assert desk.status(second) is RunStatus.PENDING


async def _ticked(loop: ControllerLoop) -> None:
    await loop.tick()
    await loop.settle()


def test_the_clusters_size_is_known_before_ray_is_reached_and_seen_afterwards(desk: Desk) -> None:
    loop = ControllerLoop(desk.database, desk.launcher, desk.settings, owner="x", expected_gpus=4.0, clock=desk.now)
    assert loop.total_gpus() == 4.0
    assert desk.loop.total_gpus() is None
    asyncio.run(_ticked(loop))
    assert loop.total_gpus() == 2.0


@pytest.mark.parametrize(("is_local", "most"), [(True, 0.0), (False, None)])
def test_only_a_cluster_elsewhere_may_get_its_first_worker_later(
    is_local: bool, most: float | None, desk: Desk
) -> None:
    desk.launcher.gpus = 0.0
    expected = 0.0 if is_local else None
    loop = ControllerLoop(
        desk.database, desk.launcher, desk.settings, owner="x", expected_gpus=expected, clock=desk.now
    )
    asyncio.run(_ticked(loop))
    assert loop.most_gpus() == most


def test_gpus_of_others_on_the_cluster_are_left_alone(desk: Desk) -> None:
    desk.launcher.gpus_used = 1.0
    uid = desk.submit(world_size=2)
    desk.tick()
    assert desk.run(uid).waiting_reason == "needs 2 GPUs, 1 free"


def test_a_repeated_tick_changes_nothing(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick(2)
    before = desk.run(uid).revision, desk.events(uid)
    desk.tick(5)
    assert (desk.run(uid).revision, desk.events(uid)) == before


# -- ends that nobody reported ---------------------------------------------------------------------------------------


def test_a_job_that_dies_without_an_outcome_gets_another_attempt(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.launcher.end(first_attempt(uid), JobStatus.FAILED, exit_code=-9)
    desk.tick()
    assert desk.attempt_statuses(uid) == [AttemptStatus.FAILED, AttemptStatus.PENDING]
    assert desk.run(uid).attempts[0].failure_kind is FailureKind.WORKER_DIED


def test_attempts_end_after_their_number_and_the_run_has_failed(desk: Desk) -> None:
    uid = desk.submit()
    for number in (1, 2, 3):
        desk.tick()
        desk.launcher.end(f"run-{uid}-a{number}", JobStatus.FAILED, exit_code=1, message="boom")
    desk.tick()
    run = desk.run(uid)
    assert run.status is RunStatus.FAILED
    assert run.failure_kind is FailureKind.SETUP_FAILED
    assert len(run.attempts) == 3


def test_c03_a_job_whose_environment_cannot_be_set_up_ends_the_run_with_rays_words(
    make_desk: Callable[..., Desk],
) -> None:
    desk = make_desk(max_attempts=2)
    uid = desk.submit()
    said = "runtime_env setup failed: No matching distribution found for no-such-package"
    for number in (1, 2):
        desk.tick()
        name = f"run-{uid}-a{number}"
        job = desk.launcher.rows[name]
        desk.launcher.rows[name] = Job(name, JobStatus.FAILED, job.owner, said, "RUNTIME_ENV_SETUP_FAILURE")
    desk.tick()
    run = desk.run(uid)
    assert (run.status, run.failure_kind, run.failure_message) == (RunStatus.FAILED, FailureKind.SETUP_FAILED, said)


def test_c03_a_job_whose_environment_is_still_being_set_up_can_be_stopped(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    name = first_attempt(uid)
    desk.launcher.rows[name] = Job(name, JobStatus.PENDING, desk.launcher.rows[name].owner)
    desk.request_stop(uid)
    desk.tick()
    assert desk.launcher.stopped == [name]
    desk.pass_time(desk.settings.stop_grace_s + 1)
    desk.tick()
    assert desk.status(uid) is RunStatus.STOPPED


def test_c03_a_job_that_is_never_set_up_is_ended_at_the_limit(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(max_attempts=1)
    uid = desk.submit()
    desk.tick()
    name = first_attempt(uid)
    desk.launcher.rows[name] = Job(name, JobStatus.PENDING, desk.launcher.rows[name].owner)
    desk.tick()
    assert desk.status(uid) is RunStatus.PENDING
    expire_lease(desk, name)
    desk.tick()
    run = desk.run(uid)
    assert run.status is RunStatus.FAILED
    assert run.failure_message
    assert desk.launcher.stopped == [name]


def test_the_pause_before_a_retry_is_kept(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(retry_backoff_s=60.0)
    uid = desk.submit()
    desk.tick()
    desk.launcher.end(first_attempt(uid), JobStatus.FAILED)
    desk.tick(3)
    assert desk.status(uid) is RunStatus.QUEUED
    assert desk.run(uid).waiting_reason == "pauses before attempt 2"


def test_a_verdict_bearing_death_is_final(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.report(first_attempt(uid), AttemptStatus.FAILED, FailureKind.LOSS_SCALE_EXHAUSTED)
    desk.tick()
    assert desk.status(uid) is RunStatus.FAILED
    assert len(desk.run(uid).attempts) == 1


def test_a_refused_job_is_retried_and_then_fails_with_rays_words(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(max_attempts=2)
    desk.launcher.refusal = "no such interpreter"
    uid = desk.submit()
    desk.tick(4)
    run = desk.run(uid)
    assert run.status is RunStatus.FAILED
    assert run.failure_message == "no such interpreter"
    assert len(run.attempts) == 2


def test_refusals_that_a_tick_has_no_time_for_keep_rays_words(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.controller.plan.CLOSINGS_A_TICK", 1)
    desk = make_desk(gpus=4.0, max_attempts=1)
    desk.launcher.refusal = "no such interpreter"
    uids = [desk.submit() for _ in range(4)]
    desk.tick(6)
    assert {desk.run(uid).failure_message for uid in uids} == {"no such interpreter"}


def test_a_job_that_cannot_be_written_down_here_fails_with_that_reason(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk(max_attempts=1)

    async def submit(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(desk.launcher, "submit", submit)
    uid = desk.submit()
    desk.tick(2)
    run = desk.run(uid)
    assert (run.status, run.failure_kind) == (RunStatus.FAILED, FailureKind.SETUP_FAILED)
    assert "No space left on device" in run.failure_message


@pytest.mark.parametrize("what", ["prepare", "prune"])
def test_a_cluster_that_does_not_do_what_it_need_not_runs_jobs_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise LauncherUnavailable("the head's agent does not answer")

    monkeypatch.setattr(desk.launcher, what, fail)
    uid = desk.submit()
    desk.tick(2)
    assert desk.status(uid) is RunStatus.PENDING
    assert desk.loop.problems == []


@pytest.mark.parametrize(
    ("error", "level"),
    [(LauncherStarting("the local Ray is starting"), "INFO"), (LauncherUnavailable("it is away"), "WARNING")],
)
def test_a_local_ray_that_is_about_to_answer_is_nothing_to_warn_of(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, level: str
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(desk.launcher, "resources", fail)
    with caplog.at_level("INFO", logger="service.controller.loop"):
        desk.tick()
    assert [record.levelname for record in caplog.records if "not reachable" in record.message] == [level]
    assert desk.loop.problems != []


def test_what_a_tick_has_changed_is_told_although_the_store_is_away_a_moment_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(desk.loop, "_on_change", lambda: told.append(True))

    def away() -> None:
        raise Unavailable("the database cannot answer now")

    monkeypatch.setattr(desk.loop._deliverer, "due", away)
    desk.submit()
    with pytest.raises(Unavailable):
        desk.tick()
    assert told == [True]


def test_a_restarted_cluster_loses_the_attempt_and_not_the_run(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.launcher.forget_all()
    desk.tick()
    assert desk.attempt_statuses(uid) == [AttemptStatus.LOST, AttemptStatus.PENDING]


def test_a_silent_worker_group_is_ended_and_its_job_stopped(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.tick()
    expire_lease(desk, first_attempt(uid))
    desk.tick()
    assert desk.launcher.stopped == [first_attempt(uid)]
    assert desk.run(uid).attempts[0].failure_kind is FailureKind.WORKER_STALLED


def test_leases_that_ran_out_while_the_controller_was_away_are_extended(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    expire_lease(desk, first_attempt(uid))
    desk.restart()
    desk.tick()
    assert desk.attempt_statuses(uid) == [AttemptStatus.RUNNING]
    assert desk.launcher.stopped == []


# -- the cluster away ------------------------------------------------------------------------------------------------


def test_nothing_starts_and_nothing_is_lost_while_the_cluster_is_away(desk: Desk) -> None:
    running = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(running))
    desk.launcher.is_reachable = False
    queued = desk.submit()
    desk.tick(3)
    assert desk.status(running) is RunStatus.RUNNING
    assert desk.run(queued).waiting_reason == "the Ray cluster is not reachable"
    assert desk.loop.problems == ["the cluster is away"]
    desk.launcher.is_reachable = True
    desk.tick()
    assert desk.status(queued) is RunStatus.PENDING
    assert desk.loop.problems == []


def test_an_answer_lost_on_the_way_is_no_second_job(desk: Desk) -> None:
    desk.launcher.loses_answers = True
    uid = desk.submit()
    desk.tick(3)
    assert desk.attempt_statuses(uid) == [AttemptStatus.PENDING]
    assert list(desk.launcher.requests) == [first_attempt(uid)]


# -- a controller that died ------------------------------------------------------------------------------------------


def test_a_restarted_controller_adopts_what_runs(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.restart()
    desk.tick(2)
    assert desk.attempt_statuses(uid) == [AttemptStatus.RUNNING]
    desk.report(first_attempt(uid), AttemptStatus.SUCCEEDED)
    assert desk.status(uid) is RunStatus.SUCCEEDED


def test_a_controller_killed_between_commit_and_submission_submits_anew(desk: Desk) -> None:
    uid = desk.submit()

    async def decide_only() -> None:
        desk.loop._act = lambda plan: None  # type: ignore[method-assign]
        await desk.loop.tick()

    asyncio.run(decide_only())
    assert desk.launcher.requests == {}
    desk.restart()
    desk.tick(2)
    assert desk.attempt_statuses(uid) == [AttemptStatus.LOST, AttemptStatus.PENDING]
    assert list(desk.launcher.requests) == [f"run-{uid}-a2"]


# -- stopping --------------------------------------------------------------------------------------------------------


# -- orphans ---------------------------------------------------------------------------------------------------------


# -- the loop itself -------------------------------------------------------------------------------------------------


def test_a_wake_is_answered_at_once_and_not_at_the_next_interval(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(tick_s=60.0)

    async def submit_and_wait() -> float:
        desk.loop.start()
        await asyncio.sleep(0.3)
        uid = await asyncio.to_thread(desk.submit)
        began = time.monotonic()
        await asyncio.to_thread(desk.loop.wake)
        while first_attempt(uid) not in desk.launcher.requests:
            assert time.monotonic() - began < 60
            await asyncio.sleep(0.005)
        took = time.monotonic() - began
        await desk.loop.stop()
        return took

    # The interval is five times as long where the queue was empty.
    assert asyncio.run(submit_and_wait()) < 30.0


def test_a_failing_tick_is_logged_and_survived(
    make_desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk(tick_s=0.05)
    uid = desk.submit()
    failures = iter([OSError("the disk is full")])
    real = desk.loop._decide

    def fail_once(situation: object) -> object:
        for error in failures:
            raise error
        return real(situation)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.loop, "_decide", fail_once)

    async def run() -> None:
        desk.loop.start()
        async with asyncio.timeout(60):
            while first_attempt(uid) not in desk.launcher.requests:
                await asyncio.sleep(0.02)
        await desk.loop.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert desk.status(uid) is RunStatus.PENDING
    assert [record.action for record in caplog.records] == ["tick_failed"]  # type: ignore[attr-defined]


def test_a_first_job_finds_the_cluster_prepared(desk: Desk) -> None:
    desk.tick(3)
    assert desk.launcher.prepared == 1


def test_a_row_that_refuses_its_change_does_not_keep_others_from_theirs(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    odd = desk.submit()
    desk.tick()
    with desk.database.write() as session:
        # A state that no code of ours writes: queued, with a live attempt.
        run = RunRepository(session).get(odd)
        run.status = RunStatus.QUEUED
        QueueRepository(session).enter(run)
    sound = desk.submit()
    desk.tick()
    assert desk.status(sound) is RunStatus.PENDING
    assert desk.status(odd) is RunStatus.QUEUED
    assert {record.action for record in caplog.records if record.levelname == "ERROR"} == {"change_refused"}  # type: ignore[attr-defined]


def test_a_loop_that_rests_after_its_tick_ends_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    resting: list[float] = []
    monkeypatch.setattr(desk.loop, "_rest_s", lambda taken_s: resting.append(taken_s) or 600.0)

    async def start_and_stop() -> float:
        desk.loop.start()
        while not resting:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await desk.loop.stop()
        return time.monotonic() - began

    assert asyncio.run(start_and_stop()) < 60
