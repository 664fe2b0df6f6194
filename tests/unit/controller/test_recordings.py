"""Scripts that record themselves, as the controller's ticks meet them: no job, no GPU, a lease of their own."""

import asyncio
from unittest.mock import AsyncMock, Mock

from muonscope.contract.run_spec import ExternalTask, RunSpec
from muonscope.contract.status import AttemptStatus, RunStatus
from service.app import _stop_ray
from service.controller.transitions import LEGAL
from service.recordings import begin_recording
from service.store.attempts import AttemptRepository
from tests.unit.controller.conftest import Desk


def record(desk: Desk) -> tuple[str, str]:
    spec = RunSpec(name="mine", task=ExternalTask(), world_size=2)
    with desk.database.write() as session:
        attempt, _ = begin_recording(session, spec, lease_s=3600.0, legal=LEGAL, who="me", why="recorded")
        return attempt.run.uid, attempt.submission_id


def test_a_recording_lives_without_a_job_and_holds_no_gpu(desk: Desk) -> None:
    recorded, _ = record(desk)
    queued = desk.submit(world_size=2)

    desk.tick(3)

    assert desk.status(recorded) is RunStatus.RUNNING
    assert desk.status(queued) is RunStatus.PENDING
    assert list(desk.launcher.requests) == [f"run-{queued}-a1"]


def test_a_recording_keeps_no_service_from_its_end(desk: Desk) -> None:
    record(desk)

    assert not desk.loop.has_live_attempts()
    assert not desk.loop.has_wanted_attempts()


def test_a_run_that_is_to_be_stopped_keeps_no_ray_beyond_the_service_and_any_other_does(desk: Desk) -> None:
    run_id = desk.submit(world_size=2)
    desk.tick(3)
    assert desk.loop.has_wanted_attempts()

    assert _is_ray_kept(desk)

    desk.request_stop(run_id)

    assert desk.loop.has_live_attempts()
    assert not desk.loop.has_wanted_attempts()
    assert not _is_ray_kept(desk)


def _is_ray_kept(desk: Desk) -> bool:
    """Ask what the application asks of its Ray when it ends."""
    local_ray = AsyncMock()
    asyncio.run(_stop_ray(local_ray, desk.loop, Mock(another_leads=False)))
    return bool(local_ray.stop.await_args.kwargs["keep_running"])


def test_a_silent_recording_is_closed_and_never_started_again(desk: Desk) -> None:
    recorded, attempt_id = record(desk)
    desk.tick(2)
    with desk.database.write() as session:
        attempts = AttemptRepository(session)
        attempts.extend_lease(attempts.get(attempt_id), lease_s=-1)

    desk.tick(3)

    assert desk.status(recorded) is RunStatus.FAILED
    assert desk.attempt_statuses(recorded) == [AttemptStatus.LOST]
    assert desk.launcher.requests == {}


def test_a_controller_that_was_away_gives_a_recording_its_whole_lease(desk: Desk) -> None:
    recorded, attempt_id = record(desk)
    with desk.database.write() as session:
        attempts = AttemptRepository(session)
        attempts.extend_lease(attempts.get(attempt_id), lease_s=-1)

    # The first tick of a process: nobody could have extended leases before it.
    desk.tick()

    attempt = desk.run(recorded).attempts[0]
    assert desk.status(recorded) is RunStatus.RUNNING
    assert (attempt.lease_expires_at - attempt.created_at).total_seconds() > 3000


def test_a_run_with_code_of_its_own_is_submitted_with_it(desk: Desk) -> None:
    package = "gcs://_ray_pkg_0123456789abcdef.zip"
    uid = desk.submit(task={"name": "mine:build"}, working_dir=package)
    plain = desk.submit()

    desk.tick()

    assert desk.launcher.requests[f"run-{uid}-a1"].working_dir == package
    assert desk.launcher.requests[f"run-{plain}-a1"].working_dir is None
