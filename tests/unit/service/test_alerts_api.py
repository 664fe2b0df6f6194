"""Alerts over HTTP, in the clients and at the command line, against a service on a real socket."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from muonscope.client import Client
from muonscope.errors import InvalidRequest, NotFound
from service.webhooks import Answer, Sender
from tests.unit.cli.conftest import command as command
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving

WHEN = {"kind": "verdict", "verdicts": ["dies"]}


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("home"), FakeLauncher()) as client:
        yield client


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A receiver's address and what it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *arguments: object) -> None:
            """Keep the test's output to itself."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/T0/SECRET", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_alert_is_made_listed_tested_and_deleted_by_the_client(
    make_client: Callable[..., httpx.Client], hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = hook
    raw = make_client(alert_networks="127.0.0.0/8", alert_allow_http=True)
    with Client(str(raw.base_url)) as client:
        made = client.alerts.create("deaths", url, WHEN, tag="nightly")
        (listed,) = client.alerts.list()
        assert made.secret is not None
        assert made.secret.startswith("whsec_")
        assert (listed.secret, listed.name, listed.tag, listed.when["verdicts"]) == (
            None,
            "deaths",
            "nightly",
            ["dies"],
        )
        sent = client.alerts.test(made.id)
        deadline = time.monotonic() + 60
        while (row := client.alerts.deliveries(made.id).items[0]).status == "pending":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (row.id, row.status, row.attempts, row.response_code, row.response) == (
            sent.id,
            "delivered",
            1,
            200,
            "ok",
        )
        assert bodies[0] == json.loads(row.body)
        assert bodies[0]["type"] == "test"
        client.alerts.delete(made.id)
        assert client.alerts.list() == []
        with pytest.raises(NotFound):
            client.alerts.deliveries(made.id)


def test_what_follows_the_host_and_the_secret_is_never_shown_again(client: httpx.Client, tmp_path: Path) -> None:
    body = {"name": "a", "url": "https://hooks.example/T0/SECRET", "when": WHEN}
    made = client.post("/alerts", json=body)

    assert made.status_code == 201
    shown = client.get("/alerts").text + client.get(made.headers["Location"]).text
    assert "SECRET" not in shown
    assert made.json()["secret"] not in shown
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("muonscope.db*"))
    assert made.json()["secret"].encode() not in stored


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"url": "http://hooks.example/"}, "url"),
        ({"url": "https://127.0.0.1/"}, "url"),
        ({"url": "https://x\u0000/"}, "url"),
        ({"when": {"kind": "verdict", "verdicts": []}}, "when.verdicts"),
        ({"when": {"kind": "verdict", "verdicts": ["sad"]}}, "when.verdicts[0]"),
        ({"when": {"kind": "moon"}}, "when"),
        ({"when": {"kind": "discarded_share", "share": 1.5}}, "when.share"),
        ({"when": {"kind": "discarded_share", "share": 0.5, "after_steps": True}}, "when.after_steps"),
        ({"when": {"kind": "silence", "seconds": 0}}, "when.seconds"),
        ({"name": ""}, "name"),
        ({"secret": "mine"}, "secret"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_its_field(
    shared_client: httpx.Client, change: dict[str, Any], field: str
) -> None:
    answer = shared_client.post("/alerts", json={"name": "a", "url": "https://hooks.example/", "when": WHEN, **change})

    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert answer.json()["remedy"]


def test_deliveries_are_read_page_by_page(shared_client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(*_: object) -> Answer:
        return Answer(error="nobody is there")

    # A name that is looked up may keep the service from its end for as long as no name server answers.
    monkeypatch.setattr(Sender, "send", send)
    made = shared_client.post("/alerts", json={"name": "a", "url": "https://hooks.invalid/", "when": WHEN}).json()
    sent = [shared_client.post(f"/alerts/{made['id']}/test").json()["id"] for _ in range(5)]

    seen: list[str] = []
    before: int | None = None
    while True:
        params = {"limit": 2} | ({} if before is None else {"before": before})
        page = shared_client.get(f"/alerts/{made['id']}/deliveries", params=params).json()
        seen += [row["id"] for row in page["deliveries"]]
        before = page["next_before"]
        if before is None:
            break
    assert seen == sent[::-1]
    assert shared_client.get("/alerts/none/deliveries").status_code == 404
    assert shared_client.delete(f"/alerts/{made['id']}").status_code == 204


def test_the_number_of_alerts_is_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.store.alerts.MAX_ALERTS", 2)
    body = {"name": "a", "url": "https://hooks.example/", "when": WHEN}
    codes = [client.post("/alerts", json=body).status_code for _ in range(3)]

    assert codes == [201, 201, 409]


def test_the_command_line_makes_tests_lists_and_removes(
    make_client: Callable[..., httpx.Client],
    hook: tuple[str, list[dict[str, Any]]],
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, _ = hook
    raw = make_client(alert_networks="127.0.0.0/8", alert_allow_http=True)
    monkeypatch.setenv("MUONSCOPE_URL", str(raw.base_url))
    made = command("alert", "create", url, "--discarded-share", "0.3", "--after-steps", "20")
    alert = made.out.strip()
    assert "whsec_" in made.err
    assert "whsec_" not in made.out
    assert "more than 0.3 of 20 steps" in command("alert", "ls").out
    tested = command("alert", "test", alert, "--json")
    assert (tested.code, json.loads(tested.out)[0]["status"]) == (0, "delivered")
    assert "delivered" in command("alert", "deliveries", alert).out
    assert command("alert", "rm", alert).code == 0
    assert json.loads(command("alert", "ls", "--json").out) == []
    assert command("alert", "create", url, "--silence", "9", "--verdict", "dies").code == 2
    gone = command("alert", "rm", alert)
    assert (gone.code, "`muonscope alert ls`" in gone.err) == (1, True)


def test_a_client_says_what_was_wrong(shared_client: httpx.Client) -> None:
    with Client(str(shared_client.base_url)) as client, pytest.raises(InvalidRequest) as refused:
        client.alerts.create("a", "http://hooks.example/", WHEN)
    assert refused.value.field == "url"
