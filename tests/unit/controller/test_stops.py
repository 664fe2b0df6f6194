"""How runs are stopped, and which jobs nobody owns."""

from muonscope.contract.status import AttemptStatus, RunStatus
from service.controller.launcher import Job, JobStatus
from tests.unit.controller.conftest import OWNER, Desk


def first_attempt(uid: str) -> str:
    return f"run-{uid}-a1"


def test_a_stop_reaches_the_job_in_the_next_tick(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.request_stop(uid)
    desk.tick()
    assert desk.launcher.stopped == [first_attempt(uid)]
    assert desk.status(uid) is RunStatus.RUNNING


def test_a_stop_is_not_repeated_at_every_tick(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.request_stop(uid)
    desk.tick(5)
    assert desk.launcher.stopped == [first_attempt(uid)]
    desk.pass_time(3.0)
    desk.tick()
    assert desk.launcher.stopped == [first_attempt(uid)] * 2


def test_a_driver_that_reports_its_stop_closes_the_run(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.request_stop(uid)
    desk.tick()
    desk.report(first_attempt(uid), AttemptStatus.STOPPED)
    desk.launcher.end(first_attempt(uid), JobStatus.STOPPED)
    desk.tick()
    assert desk.status(uid) is RunStatus.STOPPED


def test_a_driver_that_never_answers_is_closed_after_its_grace(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.enrol(first_attempt(uid))
    desk.request_stop(uid)
    desk.tick()
    desk.pass_time(desk.settings.stop_grace_s - 0.1)
    desk.tick()
    assert desk.status(uid) is RunStatus.RUNNING
    desk.pass_time(0.2)
    desk.tick()
    assert desk.status(uid) is RunStatus.STOPPED
    assert desk.attempt_statuses(uid) == [AttemptStatus.STOPPED]


def test_a_job_stopped_from_outside_is_a_stopped_run(desk: Desk) -> None:
    uid = desk.submit()
    desk.tick()
    desk.launcher.end(first_attempt(uid), JobStatus.STOPPED)
    desk.tick()
    assert desk.status(uid) is RunStatus.STOPPED


def test_an_orphaned_job_is_stopped_on_the_second_look(desk: Desk) -> None:
    desk.launcher.rows["run-zz-a1"] = Job("run-zz-a1", JobStatus.RUNNING, owner=OWNER)
    desk.tick()
    assert desk.launcher.stopped == []
    desk.pass_time(11)
    desk.tick()
    assert desk.launcher.stopped == ["run-zz-a1"]


def test_another_services_jobs_are_left_alone(desk: Desk) -> None:
    desk.launcher.rows["run-zz-a1"] = Job("run-zz-a1", JobStatus.RUNNING, owner="another-store")
    for _ in range(3):
        desk.tick()
        desk.pass_time(11)
    assert desk.launcher.stopped == []
