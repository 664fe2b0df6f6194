"""The reporter: news wait for a controller that is away, and a newer attempt ends them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from muonscope.contract.attempts import AttemptOutcome, CheckpointReport, Heartbeat
from muonscope.contract.status import AttemptStatus, Phase
from tests.unit.workers.fake_controller import FakeController, running, wait_until
from workers.controller_client import ControllerClient
from workers.errors import AttemptSuperseded, ControllerAway
from workers.reporter import Reporter

OUTCOME = AttemptOutcome(status=AttemptStatus.SUCCEEDED, declared_steps=0)


@contextmanager
def reporter_to(controller: FakeController, *, is_started: bool = True) -> Iterator[Reporter]:
    client = ControllerClient(controller.url, controller.attempt_id, controller.token, timeout_s=30)
    reporter = Reporter(client, heartbeat_s=0.05)
    if is_started:
        reporter.start()
    yield reporter
    reporter.end()
    client.close()


def test_facts_and_heartbeats_arrive() -> None:
    with running() as controller, reporter_to(controller) as reporter:
        reporter.tell({Phase.ENROLLED: 5.0}, data_hash="abc")
        reporter.beat(Heartbeat(status=AttemptStatus.RUNNING, steps_recorded=7, silent_ranks=[1]))

        wait_until(lambda: controller.facts.get("data_hash") == "abc")
        wait_until(lambda: bool(controller.heartbeats) and controller.heartbeats[-1].steps_recorded == 7)

    assert controller.facts["phases"] == {Phase.ENROLLED: 5.0}


def test_later_phases_join_the_earlier_ones() -> None:
    with running() as controller, reporter_to(controller) as reporter:
        reporter.tell({Phase.ENROLLED: 5.0})
        reporter.tell({Phase.IMPORTED: 6.0})

        wait_until(lambda: controller.facts.get("phases") == {Phase.ENROLLED: 5.0, Phase.IMPORTED: 6.0})


def test_a_stop_asked_for_in_an_answer_is_noted() -> None:
    with running() as controller, reporter_to(controller) as reporter:
        assert not reporter.stop_requested.is_set()
        controller.stop_requested = True

        assert reporter.stop_requested.wait(60)


def test_an_answer_that_is_none_of_the_controllers_ends_no_reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def page(_: bytes) -> tuple[int, bytes]:
        asked.set()
        return 200, b"<html>We are back soon.</html>"

    with running() as controller:
        monkeypatch.setattr(controller, "_beat", page)
        with reporter_to(controller) as reporter:
            assert asked.wait(60)
            monkeypatch.undo()
            controller.stop_requested = True

            assert reporter.stop_requested.wait(60)


def test_a_newer_attempt_is_noted() -> None:
    with running() as controller, reporter_to(controller) as reporter:
        controller.superseded = True

        assert reporter.superseded.wait(60)


def test_news_told_while_the_controller_was_away_are_sent_with_the_outcome() -> None:
    controller = FakeController()
    controller.start()
    controller.stop()
    with reporter_to(controller) as reporter:
        reporter.tell({Phase.LAST_STEP: 9.0})
        threading.Timer(0.5, controller.start).start()

        reporter.finish(OUTCOME, patience_s=60, give_up=threading.Event())

    assert controller.facts["phases"] == {Phase.LAST_STEP: 9.0}
    assert controller.outcome == OUTCOME
    controller.stop()


def test_an_outcome_that_nobody_takes_is_an_error_after_the_patience() -> None:
    controller = FakeController()
    controller.start()
    controller.stop()

    with reporter_to(controller, is_started=False) as reporter, pytest.raises(ControllerAway):
        reporter.finish(OUTCOME, patience_s=0.3, give_up=threading.Event())


def test_a_superseded_attempts_outcome_is_refused() -> None:
    with running() as controller, reporter_to(controller, is_started=False) as reporter:
        controller.superseded = True

        with pytest.raises(AttemptSuperseded):
            reporter.finish(OUTCOME, patience_s=60, give_up=threading.Event())


@pytest.mark.parametrize("message", ["_facts", "_take_checkpoints"])
def test_news_that_the_controller_will_not_take_keep_no_outcome_back(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as controller, reporter_to(controller, is_started=False) as reporter:
        monkeypatch.setattr(controller, message, lambda _: (413, b'{"detail":"larger than 1048576 bytes"}'))
        reporter.tell({Phase.FINISHED: 9.0})
        reporter.tell_checkpoints(CheckpointReport(checkpoints=()))

        reporter.finish(OUTCOME, patience_s=60, give_up=threading.Event())

        assert controller.outcome == OUTCOME


def test_news_that_the_controller_will_not_take_keep_no_heartbeat_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as controller:
        for message in ("_facts", "_take_checkpoints"):
            monkeypatch.setattr(controller, message, lambda _: (422, b'{"detail":"no"}'))
        with reporter_to(controller, is_started=False) as reporter:
            reporter.tell({Phase.ENROLLED: 5.0})
            reporter.tell_checkpoints(CheckpointReport(checkpoints=()))
            reporter.start()

            wait_until(lambda: len(controller.heartbeats) >= 2)
