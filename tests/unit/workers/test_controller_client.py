"""The controller's answers, each in the job's own words."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from muonscope.contract.attempts import Heartbeat
from muonscope.contract.status import AttemptStatus
from muonscope.contract.telemetry import StepRecord, encode_batch, encode_record
from tests.unit.workers.fake_controller import FakeController, running
from workers.controller_client import ControllerClient, Pauses, until_answered
from workers.errors import AttemptSuperseded, ControllerAway, ControllerRefused


@contextmanager
def client_of(controller: FakeController, token: str | None = None) -> Iterator[ControllerClient]:
    client = ControllerClient(controller.url, controller.attempt_id, token or controller.token, timeout_s=30)
    yield client
    client.close()


def test_a_second_enrolment_is_refused() -> None:
    with running() as controller, client_of(controller) as client:
        assert client.post("enrol", b'{"token":"once"}')

        with pytest.raises(ControllerRefused) as refusal:
            client.post("enrol", b'{"token":"once"}')

    assert refusal.value.status == 409
    assert not isinstance(refusal.value, AttemptSuperseded)


def test_a_conflict_on_a_heartbeat_means_superseded() -> None:
    with running() as controller, client_of(controller) as client:
        controller.superseded = True

        with pytest.raises(AttemptSuperseded):
            client.post("heartbeat", b"{}")


def test_a_wrong_token_is_a_refusal() -> None:
    with (
        running() as controller,
        client_of(controller, token="guessed") as client,
        pytest.raises(ControllerRefused, match="401"),
    ):
        client.post("heartbeat", b"{}")


def test_a_server_error_is_worth_another_try() -> None:
    with running() as controller, client_of(controller) as client:
        controller.answers_before_failing = 0

        with pytest.raises(ControllerAway, match="503"):
            client.post("steps", b"")


def test_a_connection_lost_between_two_posts_is_made_anew() -> None:
    with running() as controller, client_of(controller) as client:
        client.post("enrol", b'{"token":"once"}')
        controller.stop()
        with pytest.raises(ControllerAway):
            client.post("heartbeat", b'{"status":"running"}')
        controller.start()

        assert client.post("heartbeat", b'{"status":"running"}')


@pytest.mark.parametrize("url", ["ftp://host", "host:8800", "http://"])
def test_an_address_that_is_no_http_url_is_a_bad_argument(url: str) -> None:
    with pytest.raises(ValueError, match="controller URL"):
        ControllerClient(url, "run-x-a1")


def test_waiting_ends_with_the_patience() -> None:
    def away() -> None:
        raise ControllerAway("http://x", "refused")

    started = time.monotonic()
    with pytest.raises(ControllerAway):
        until_answered(away, patience_s=0.3)
    assert time.monotonic() - started < 60


def test_waiting_ends_early_when_told_to_give_up() -> None:
    def away() -> None:
        raise ControllerAway("http://x", "refused", retry_after_s=120)

    give_up = threading.Event()
    threading.Timer(0.1, give_up.set).start()
    started = time.monotonic()
    with pytest.raises(ControllerAway):
        until_answered(away, patience_s=1200, give_up=give_up)
    assert time.monotonic() - started < 60


def test_pauses_grow_to_a_limit_and_heed_what_is_asked() -> None:
    pauses = Pauses()
    waits = [pauses.next() for _ in range(12)]

    assert waits[0] < 0.2
    assert 3.9 < waits[-1] <= 6.0
    assert pauses.next(asked_s=20) == 20
    pauses.reset()
    assert pauses.next() < 0.2


def test_of_several_controllers_the_next_is_asked_when_one_is_away() -> None:
    with running(attempt_id="run-x-a1") as leading, running(attempt_id="run-x-a1") as gone:
        gone.stop()
        client = ControllerClient(f"{gone.url},{leading.url}", "run-x-a1", "attempt-token")
        body = Heartbeat(status=AttemptStatus.RUNNING).model_dump_json().encode()

        until_answered(lambda: client.post("heartbeat", body), patience_s=60.0)
        client.post("heartbeat", body)

        client.close()
    assert len(leading.heartbeats) == 2


def test_a_controller_that_stands_by_sends_its_caller_on() -> None:
    with running(attempt_id="run-x-a1") as leading, running(attempt_id="run-x-a1") as standing_by:
        standing_by.answers_before_failing = 0
        client = ControllerClient(f"{standing_by.url},{leading.url}", "run-x-a1", "attempt-token")
        batch = encode_batch([encode_record(StepRecord(0, False, False))], epoch=1)

        until_answered(lambda: client.post("steps", batch), patience_s=60.0)

        client.close()
    assert list(leading.records) == [0]
    assert standing_by.records == {}
