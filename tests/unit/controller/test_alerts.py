"""Alerts in the controller: told once for what happened, sent until taken, whatever is killed in between."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sqlalchemy import update

from muonscope.contract.alerts import AlertRule
from muonscope.contract.status import AttemptStatus, DeliveryStatus, FailureKind, RunStatus
from service.store.alert_models import AlertDelivery
from service.store.alerts import AlertRepository
from service.store.models import Attempt
from service.store.runs import RunRepository
from service.store.session import Database
from service.store.types import read_clock
from service.webhooks import SigningKey
from tests.unit.controller.conftest import Desk

LOOPBACK = {"alert_networks": "127.0.0.0/8", "alert_allow_http": True, "alert_backoff_s": 0.001}


@dataclass
class Receiver:
    """A webhook's receiver on a real port."""

    port: int
    answers: list[int] = field(default_factory=list)
    """HTTP statuses to answer with, the first ones first; 200 once they are used up."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def told(self) -> list[str]:
        return [f"{body['type']} {body['data']['run']['id']}" for body in self.bodies]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            one.bodies.append(json.loads(body))
            one.headers.append({**dict(self.headers), "body": body.decode()})
            self.send_response(one.answers.pop(0) if one.answers else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Keep the test's output to itself."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    one = Receiver(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield one
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk(**LOOPBACK)


def watch(desk: Desk, url: str, *, tag: str | None = None, **when: Any) -> str:
    key = SigningKey.load(desk.settings.effective_alert_key_file)
    rule = AlertRule.model_validate({"name": "an alert", "url": url, "when": when, "tag": tag})
    with desk.database.write() as session:
        return AlertRepository(session).create(rule, key_id=key.id, who="ann").uid


def deliveries(database: Database, alert: str) -> list[AlertDelivery]:
    with database.read() as session:
        alerts = AlertRepository(session)
        return list(alerts.deliveries(alerts.get(alert)))


def fail(desk: Desk, **spec: Any) -> str:
    """Have a run fail for good."""
    uid = desk.submit(**spec)
    desk.tick()
    desk.enrol(f"run-{uid}-a1")
    desk.report(f"run-{uid}-a1", AttemptStatus.FAILED, FailureKind.LOSS_SCALE_EXHAUSTED)
    return uid


def test_a_status_and_a_verdict_are_told_once_signed_and_logged(desk: Desk, receiver: Receiver) -> None:
    before = fail(desk)
    on_failure = watch(desk, receiver.url, kind="status", statuses=["failed"])
    on_verdict = watch(desk, receiver.url, kind="verdict", verdicts=["dies"])
    uid = fail(desk)
    desk.tick(3)

    assert sorted(receiver.told) == [f"run.failed {uid}", f"run.verdict {uid}"]
    assert before not in str(receiver.bodies)
    sent = receiver.headers[receiver.told.index(f"run.failed {uid}")]
    key = SigningKey.load(desk.settings.effective_alert_key_file)
    wanted = key.headers(on_failure, sent["webhook-id"], int(sent["webhook-timestamp"]), sent["body"].encode())
    assert sent["webhook-signature"] == wanted["webhook-signature"]
    for alert in (on_failure, on_verdict):
        (row,) = deliveries(desk.database, alert)
        assert (row.status, row.attempts, row.response_code) == (DeliveryStatus.DELIVERED, 1, 200)


def test_only_runs_with_the_tag_and_only_the_words_that_were_asked_for_are_told(desk: Desk, receiver: Receiver) -> None:
    watch(desk, receiver.url, tag="nightly", kind="status", statuses=["failed"])
    fail(desk)
    uid = fail(desk, tags=("nightly",))
    desk.tick(3)

    assert receiver.told == [f"run.failed {uid}"]


def test_a_run_that_fails_twice_is_told_twice(desk: Desk, receiver: Receiver) -> None:
    watch(desk, receiver.url, kind="status", statuses=["failed", "queued"])
    uid = fail(desk)
    desk.tick(3)
    with desk.database.write() as session:
        runs = RunRepository(session)
        runs.set_status(runs.get(uid), RunStatus.QUEUED, legal=desk.loop.legal, who="ann", why="again")
    desk.tick()
    desk.enrol(f"run-{uid}-a2")
    desk.report(f"run-{uid}-a2", AttemptStatus.FAILED, FailureKind.LOSS_SCALE_EXHAUSTED)
    desk.tick(4)

    assert sorted(receiver.told) == sorted([f"run.queued {uid}"] * 2 + [f"run.failed {uid}"] * 2)


def test_a_share_of_discarded_steps_is_told_once_a_run_and_not_before_it_says_something(
    desk: Desk, receiver: Receiver
) -> None:
    watch(desk, receiver.url, kind="discarded_share", share=0.5, after_steps=4)
    uid, calm = desk.submit(), desk.submit()
    desk.tick()
    for steps, discarded, expected in ((3, 3, 0), (4, 2, 0), (5, 3, 1), (9, 8, 1)):
        with desk.database.write() as session:
            runs = RunRepository(session)
            for name, count in ((uid, discarded), (calm, 0)):
                run = runs.get(name)
                run.summary.steps, run.summary.discarded = steps, count
                runs.touch(run)
        desk.tick(2)
        assert receiver.told == [f"run.discarded_share {uid}"] * expected


def test_a_silence_is_told_once_and_a_later_one_anew(desk: Desk, receiver: Receiver) -> None:
    watch(desk, receiver.url, kind="silence", seconds=60)
    uid = desk.submit()
    desk.tick()
    name = f"run-{uid}-a1"
    desk.enrol(name, lease_s=900)

    def last_step(seconds_ago: float, next_step: int) -> None:
        with desk.database.write() as session:
            at = read_clock(session) - timedelta(seconds=seconds_ago)
            session.execute(update(Attempt).where(Attempt.submission_id == name).values(
                stepped_at=at, next_step=next_step))  # fmt: skip

    last_step(90, 3)
    desk.tick(3)
    assert receiver.told == [], "the controller has only begun to lead"
    for _ in range(4):
        desk.pass_time(10.0)
        desk.tick()
    desk.tick(2)
    assert receiver.told == [f"run.silent {uid}"]
    last_step(5, 4)
    desk.tick(2)
    last_step(61, 4)
    desk.tick(3)
    assert receiver.told == [f"run.silent {uid}"] * 2


def test_a_receiver_that_is_away_gets_the_same_message_once_it_is_back(desk: Desk, receiver: Receiver) -> None:
    receiver.answers = [500, 302, 429]
    alert = watch(desk, receiver.url, kind="status", statuses=["failed"])
    fail(desk)
    for _ in range(20):
        desk.tick()
        if deliveries(desk.database, alert)[0].status is DeliveryStatus.DELIVERED:
            break

    (row,) = deliveries(desk.database, alert)
    assert (row.status, row.attempts) == (DeliveryStatus.DELIVERED, 4)
    assert {headers["webhook-id"] for headers in receiver.headers} == {row.uid}
    assert len({headers["body"] for headers in receiver.headers}) == 1


def test_a_dead_receiver_is_given_up_after_its_attempts_and_the_log_says_why(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(**LOOPBACK, alert_attempts=3)
    alert = watch(desk, "http://127.0.0.1:9/", kind="status", statuses=["failed"])
    fail(desk)
    for _ in range(20):
        desk.tick()

    (row,) = deliveries(desk.database, alert)
    assert (row.status, row.attempts, row.next_try_at) == (DeliveryStatus.GIVEN_UP, 3, None)
    assert row.error is not None
    assert "ConnectError" in row.error


def test_a_controller_killed_between_commit_and_delivery_has_lost_and_doubled_nothing(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    alert = watch(desk, receiver.url, kind="status", statuses=["failed"])
    fail(desk)
    monkeypatch.setattr(desk.loop._deliverer, "due", lambda: [])
    desk.tick()
    assert [row.status for row in deliveries(desk.database, alert)] == [DeliveryStatus.PENDING]
    assert receiver.bodies == []

    desk.restart()
    desk.tick(3)

    assert len(receiver.bodies) == 1
    assert [row.status for row in deliveries(desk.database, alert)] == [DeliveryStatus.DELIVERED]


def test_a_controller_killed_before_it_writes_down_an_answer_sends_again_under_the_same_id(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(desk, receiver.url, kind="status", statuses=["failed"])
    fail(desk)
    monkeypatch.setattr(desk.loop._deliverer, "_record", lambda uid, answer: None)
    desk.tick()
    desk.restart()
    desk.tick(3)

    assert [body["id"] for body in receiver.bodies] == [receiver.bodies[0]["id"]] * 2


def test_an_alert_made_under_another_key_sends_nothing_and_says_so(desk: Desk, receiver: Receiver) -> None:
    alert = watch(desk, receiver.url, kind="status", statuses=["failed"])
    desk.settings.effective_alert_key_file.write_bytes(b"another key".ljust(32, b"."))
    fail(desk)
    desk.tick(3)

    assert receiver.bodies == []
    assert "another signing key" in str(deliveries(desk.database, alert)[0].error)


def test_more_than_a_tick_takes_on_is_told_all_the_same(desk: Desk, receiver: Receiver) -> None:
    alert = watch(desk, receiver.url, kind="status", statuses=["queued"])
    submitted = {desk.submit() for _ in range(60)}
    desk.tick()
    assert 0 < len(deliveries(desk.database, alert)) < 60
    desk.tick()

    with desk.database.read() as session:
        alerts = AlertRepository(session)
        told = [row.run_uid for row in alerts.deliveries(alerts.get(alert), limit=100)]
    assert len(told) == 60
    assert set(told) == submitted


def test_a_slow_receiver_takes_two_places_and_leaves_the_others_to_others(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = watch(desk, "http://127.0.0.1:1/slow", kind="status", statuses=["queued"])
    watch(desk, receiver.url, kind="status", statuses=["queued"])
    for _ in range(4):
        desk.submit()
    hold = asyncio.Event()
    real = desk.loop._deliverer._sender.send

    async def send(url: str, *rest: Any) -> Any:
        if url.endswith("/slow"):
            await hold.wait()
        return await real(url, *rest)

    monkeypatch.setattr(desk.loop._deliverer._sender, "send", send)

    async def ticks() -> None:
        async with asyncio.timeout(60):
            while len(receiver.bodies) < 4:
                await desk.loop.tick()
                await asyncio.sleep(0.01)
        sending = set(desk.loop._deliverer._in_flight) & {row.uid for row in deliveries(desk.database, slow)}
        hold.set()
        await desk.loop.settle()
        assert len(sending) == 2

    asyncio.run(ticks())
    assert len(receiver.bodies) == 4
    assert len(deliveries(desk.database, slow)) == 4


def test_a_message_whose_sending_ends_while_others_are_looked_for_is_not_sent_again(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(desk, receiver.url, kind="status", statuses=["queued"])
    deliverer, real = desk.loop._deliverer, AlertRepository.due
    monkeypatch.setattr(deliverer, "due", lambda: [])
    desk.submit()
    desk.tick(2)
    monkeypatch.undo()
    assert len(deliverer.due()) == 1

    def read_as_it_was(self: AlertRepository, limit: int) -> Any:
        rows = real(self, limit)
        deliverer._in_flight.clear()
        return rows

    monkeypatch.setattr(AlertRepository, "due", read_as_it_was)
    assert deliverer.due() == []
    # The control: what is not being sent is taken on.
    assert len(deliverer.due()) == 1


def test_a_rule_that_looks_again_at_what_it_has_told_tells_it_once(desk: Desk, receiver: Receiver) -> None:
    alert = watch(desk, receiver.url, kind="status", statuses=["failed"])
    fail(desk)
    desk.tick(2)
    with desk.database.write() as session:
        AlertRepository(session).get(alert).seen_event = 0
    desk.tick(2)

    assert len(receiver.bodies) == 1


def test_a_rule_that_cannot_be_read_keeps_neither_the_queue_nor_other_rules_from_theirs(
    desk: Desk, receiver: Receiver
) -> None:
    strange = watch(desk, receiver.url, kind="status", statuses=["failed"])
    watch(desk, receiver.url, kind="status", statuses=["failed"])
    with desk.database.write() as session:
        AlertRepository(session).get(strange).condition = {"kind": "of a later version"}
    uid = fail(desk)
    desk.tick(2)

    assert receiver.told == [f"run.failed {uid}"]
