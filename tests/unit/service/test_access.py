"""Tokens and scopes: who may ask for what, and what is left behind of those who may not."""

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from muonscope.contract.status import TokenScope
from service.api import access
from service.api.access import RULES, rule_for, undeclared
from service.app import ROUTERS, create_app
from service.settings import Settings
from service.store.session import Database
from service.store.tokens import PREFIX, TokenRepository
from tests.unit.service.test_bad_input import assert_problem

Serve = Callable[..., httpx.Client]
SCOPES = list(TokenScope)


@contextmanager
def store(home: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{home / 'muonscope.db'}")
    yield database
    database.dispose()


def make_token(home: Path, scope: str = "admin", name: str | None = None, **options: Any) -> str:
    with store(home) as database, database.write() as session:
        return TokenRepository(session).create(name or scope, TokenScope(scope), who="test", **options)[1]


def revoke(home: Path, name: str) -> None:
    with store(home) as database, database.write() as session:
        TokenRepository(session).revoke(name, who="test")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guarded(make_client: Serve) -> httpx.Client:
    return make_client(require_token=True)


def concrete(template: str) -> str:
    """A path that leads to the route, and to nothing that exists."""
    for placeholder, value in (
        ("{run_id}", "nosuchrun"), ("{experiment_id}", "nosuch"), ("{attempt_id}", "run-abc-a1"), ("{index}", "0"),
        ("{kind}", "user"), ("{alert_id}", "nosuch"), ("{name:path}", "nobody"), ("{path:path}", "runs"),
    ):  # fmt: skip
        template = template.replace(placeholder, value)
    return template


def test_every_route_says_who_may_ask_for_it_and_no_rule_is_left_over() -> None:
    routes = [route for router in ROUTERS for route in router.routes]
    served = {f"{method} {route.path}" for route in routes for method in route.methods if method != "HEAD"}  # type: ignore[attr-defined]

    assert undeclared(routes) == []
    # FastAPI adds this one itself.
    assert set(RULES) - served == {"GET /openapi.json"}
    for key, rule in RULES.items():
        method, template = key.split(" ")
        assert rule_for(method, concrete(template)) == rule, key


def test_a_route_without_a_scope_keeps_the_service_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(access.RULES, "DELETE /runs/{run_id}")

    with pytest.raises(RuntimeError, match=r"access\.py.*DELETE /runs"):
        create_app(Settings())


def test_what_changes_the_queue_or_deletes_is_an_admins_and_reading_alone_changes_nothing() -> None:
    scopes = {key: rule.scope for key, rule in RULES.items()}

    # Validation answers and keeps nothing.
    assert {key for key, scope in scopes.items() if scope is TokenScope.READ and not key.startswith("GET ")} == {
        "POST /runs/validate"
    }
    assert all(scopes[key] is TokenScope.ADMIN for key in scopes if key.startswith(("DELETE /runs", "PUT ", "POST /q")))
    open_writes = {key for key, scope in scopes.items() if scope is None and not key.startswith("GET ")}
    assert {key.split("/")[1] for key in open_writes} == {"session", "attempts"}


STRANGERS = {
    "nothing": {}, "a wrong token": bearer("msc_" + "x" * 43), "another scheme": {"Authorization": "Basic YTpi"},
    "no scheme": {"Authorization": "msc_x"},
}  # fmt: skip


def test_without_a_token_that_holds_every_guarded_route_answers_401(guarded: httpx.Client) -> None:
    guarded_rules = {key for key, rule in RULES.items() if rule.scope is not None}
    for headers in STRANGERS.values():
        for key in guarded_rules:
            method, template = key.split(" ")
            answer = guarded.request(method, concrete(template), headers=headers)
            assert_problem(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        # The counter-test: what is open asks nobody.
        assert [guarded.get(path, headers=headers).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        assert guarded.get("/ui/", headers=headers).status_code in (200, 503)
        assert_problem(guarded.get("/nothing/here", headers=headers), 401)


def test_a_token_opens_what_its_scope_includes_and_nothing_more(guarded: httpx.Client, tmp_path: Path) -> None:
    # The narrowest first: what the widest may do changes the service.
    for scope in SCOPES:
        token = make_token(tmp_path, scope)
        for key, rule in RULES.items():
            method, template = key.split(" ")
            if rule.scope is None or template == "/events":
                continue
            answer = guarded.request(method, concrete(template), headers=bearer(token))
            assert (answer.status_code == 403) == (not scope.includes(rule.scope)), (scope, key, answer.text)
            assert answer.status_code != 401, (scope, key)
            if answer.status_code == 403:
                assert rule.scope in assert_problem(answer, 403)["remedy"]


def test_on_loopback_a_token_is_optional_and_a_wrong_one_is_refused_all_the_same(
    client: httpx.Client, tmp_path: Path
) -> None:
    assert client.post("/runs", json={}).status_code == 201
    assert_problem(client.get("/runs", headers=bearer("msc_wrong")), 401)
    assert client.get("/runs", headers=bearer(make_token(tmp_path, "read"))).status_code == 200
    # Another program's credentials, which a proxy may pass on, are not ours to judge.
    assert client.get("/runs", headers={"Authorization": "Basic YTpi"}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False), ({"host": "127.0.0.2"}, False), ({"host": "::1"}, False), ({"host": "localhost"}, False),
        ({"require_token": True}, True), ({"host": "0.0.0.0"}, True), ({"host": "::"}, True),
        ({"host": "10.1.2.3"}, True), ({"host": "gpu-box"}, True), ({"advertise_url": "https://muon.example"}, True),
        ({"advertise_url": "http://localhost:8800"}, False),
    ],
)  # fmt: skip
def test_a_token_is_needed_as_soon_as_others_can_reach_the_service(settings: dict[str, Any], needed: bool) -> None:
    assert Settings(**settings).is_token_needed is needed


def test_a_revoked_and_an_expired_token_hold_no_more(guarded: httpx.Client, tmp_path: Path) -> None:
    token = make_token(tmp_path, name="ann")
    soon = make_token(tmp_path, name="bob", expires_at=datetime.now(UTC) + timedelta(days=1))
    assert [guarded.get("/runs", headers=bearer(each)).status_code for each in (token, soon)] == [200, 200]

    revoke(tmp_path, "ann")
    with store(tmp_path) as database, database.write() as session:
        bob = next(row for row in TokenRepository(session).list() if row.name == "bob")
        bob.expires_at = datetime.now(UTC) - timedelta(seconds=1)

    assert [guarded.get("/runs", headers=bearer(each)).status_code for each in (token, soon)] == [401, 401]


def test_a_token_is_recognisable_no_option_and_kept_nowhere(guarded: httpx.Client, tmp_path: Path) -> None:
    token = make_token(tmp_path)
    guarded.post("/runs", json={}, headers=bearer(token))

    stored = b"".join(path.read_bytes() for path in tmp_path.glob("muonscope.db*"))
    assert token.startswith(PREFIX)
    assert len(token) == len(PREFIX) + 43
    assert token.encode() not in stored
    assert token not in guarded.get("/audit", headers=bearer(token)).text
    assert b"test" in stored, "the counter-test: what is stored can be found this way"


def test_events_and_runs_carry_the_tokens_name_and_not_what_the_caller_says(
    guarded: httpx.Client, tmp_path: Path
) -> None:
    headers = {**bearer(make_token(tmp_path, "submit", "ann")), "Muonscope-User": "boss"}
    run = guarded.post("/runs", json={}, headers=headers).json()
    made = guarded.post("/experiments", json={"builtin": "calm-boom"}, headers=headers).json()

    events = guarded.get(f"/runs/{run['id']}/events", headers=headers).json()["events"]
    of_experiment = guarded.get(f"/runs/{made['runs'][0]['id']}", headers=headers).json()
    assert events[0]["who"] == "ann"
    assert (run["submitted_by"], of_experiment["submitted_by"]) == ("ann", "ann")


def test_the_audit_log_says_who_did_what_newest_first_and_page_by_page(guarded: httpx.Client, tmp_path: Path) -> None:
    headers = bearer(make_token(tmp_path, "admin", "ann"))
    run_id = guarded.post("/runs", json={}, headers=headers).json()["id"]
    guarded.get("/runs", headers=bearer("msc_wrong"))
    guarded.post("/queue/pause", json={"why": "repairs"}, headers=headers)
    guarded.put("/queue/limits/user/bob", json={"max_gpus": 1}, headers=headers)
    guarded.post(f"/runs/{run_id}/stop", headers=headers)
    deadline = time.monotonic() + 60
    while guarded.delete(f"/runs/{run_id}", headers=headers).status_code != 204:
        assert time.monotonic() < deadline
        time.sleep(0.05)

    first = guarded.get("/audit", params={"limit": 4}, headers=headers).json()
    rest = guarded.get("/audit", params={"cursor": first["next_cursor"]}, headers=headers).json()
    entries = first["entries"] + rest["entries"]
    told = [(entry["action"], entry["who"], entry["subject"]) for entry in reversed(entries)]
    assert told == [
        ("token_created", "test", "ann"), ("authentication_failed", "nobody", None),
        ("queue_mode_set", "ann", "paused"), ("limit_set", "ann", "user bob"), ("run_stopped", "ann", run_id),
        ("run_deleted", "ann", run_id),
    ]  # fmt: skip
    assert rest["next_cursor"] is None
    assert entries[-2]["address"] == "127.0.0.1"


def test_failed_authentications_are_noted_without_the_token_and_not_without_end(
    guarded: httpx.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    began = time.monotonic()
    for _ in range(40):
        guarded.get("/runs", headers=bearer("msc_guessed"))

    entries = guarded.get("/audit", headers=bearer(make_token(tmp_path))).json()["entries"]
    failed = [entry for entry in entries if entry["action"] == "authentication_failed"]
    # Ten at once, and one more in each ten seconds.
    assert 10 <= len(failed) <= 11 + (time.monotonic() - began) / 10 < 40
    assert "guessed" not in json.dumps(entries) + caplog.text
    assert "GET /runs" in failed[0]["detail"]


def test_the_last_use_of_a_token_is_noted_and_not_at_every_request(guarded: httpx.Client, tmp_path: Path) -> None:
    def last_use() -> datetime | None:
        with store(tmp_path) as database, database.read() as session:
            return TokenRepository(session).list()[0].last_used_at

    token = make_token(tmp_path)
    assert last_use() is None
    guarded.get("/runs", headers=bearer(token))
    first = last_use()
    guarded.get("/runs", headers=bearer(token))

    assert first is not None
    assert last_use() == first


# -- the dashboard's sessions ----------------------------------------------------------------------------------------


def test_a_store_that_takes_no_writes_knows_a_tokens_bearer_and_keeps_nobody_waiting_for_long(
    migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(migrated_file, tmp_path / "muonscope.db")
    token = make_token(tmp_path)
    monkeypatch.setattr("service.store.session._BUSY_TIMEOUT_S", 0.1)
    with store(tmp_path) as database, store(tmp_path) as other, other.write():
        writes: list[bool] = []
        write = database.write
        monkeypatch.setattr(database, "write", lambda **options: writes.append(True) or write(**options))
        authenticator = access.Authenticator(database)

        assert [authenticator.identify_token(token).name for _ in range(3)] == ["admin"] * 3
        assert len(writes) == 1
    # Counter-test: where it can be, the use is noted.
    with store(tmp_path) as database:
        access.Authenticator(database).identify_token(token)
        with database.read() as session:
            assert TokenRepository(session).list()[0].last_used_at is not None


def same_origin(client: httpx.Client) -> dict[str, str]:
    return {"Origin": str(client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}


def test_a_token_shown_once_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(
    guarded: httpx.Client, tmp_path: Path
) -> None:
    token = make_token(tmp_path, "submit", "ann")
    before = guarded.get("/session").json()
    signed_in = guarded.post("/session", json={"token": token})
    cookie = signed_in.headers["set-cookie"]

    assert before == {"is_token_needed": True, "name": None, "scope": None}
    assert signed_in.json() == {"is_token_needed": True, "name": "ann", "scope": "submit"}
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=604800"))
    assert token not in cookie
    assert guarded.get("/runs").status_code == 200
    assert guarded.post("/runs", json={}, headers=same_origin(guarded)).json()["submitted_by"] == "ann"


OTHER_PAGES: tuple[dict[str, str], ...] = (
    {}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"},
    {"Origin": "https://evil.example"}, {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
)  # fmt: skip


def test_a_cookie_changes_nothing_for_any_page_but_our_own(guarded: httpx.Client, tmp_path: Path) -> None:
    guarded.post("/session", json={"token": make_token(tmp_path)})

    for headers in OTHER_PAGES:
        assert_problem(guarded.post("/runs", json={}, headers=headers), 403, field="Origin")
        assert guarded.get("/runs").json()["runs"] == [], headers
    assert guarded.post("/runs", json={}, headers=same_origin(guarded)).status_code == 201


def test_behind_a_proxy_with_tls_the_cookie_stays_with_tls(guarded: httpx.Client, tmp_path: Path) -> None:
    answer = guarded.post("/session", json={"token": make_token(tmp_path)}, headers={"X-Forwarded-Proto": "https"})

    assert "Secure" in answer.headers["set-cookie"]


def test_a_wrong_token_opens_no_session_and_is_noted(guarded: httpx.Client, tmp_path: Path) -> None:
    assert_problem(guarded.post("/session", json={"token": "msc_wrong"}), 401)

    entries = guarded.get("/audit", headers=bearer(make_token(tmp_path))).json()["entries"]
    failed = next(entry for entry in entries if entry["action"] == "authentication_failed")
    assert failed["detail"].startswith("POST /session")


@pytest.mark.parametrize("end", ["sign out", "revoke"])
def test_a_session_ends_when_one_signs_out_and_with_its_token(guarded: httpx.Client, tmp_path: Path, end: str) -> None:
    guarded.post("/session", json={"token": make_token(tmp_path, name="ann")})
    cookies = dict(guarded.cookies)
    assert guarded.get("/runs").status_code == 200

    if end == "sign out":
        assert guarded.delete("/session", headers=same_origin(guarded)).status_code == 204
    else:
        revoke(tmp_path, "ann")

    guarded.cookies.update(cookies)
    assert_problem(guarded.get("/runs"), 401)


@pytest.mark.parametrize("proof", ["cookie", "bearer"])
def test_a_live_stream_is_opened_by_either_proof_and_ends_when_the_token_does(
    guarded: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: str
) -> None:
    monkeypatch.setattr(access, "RECHECK_S", 0.0)
    token = make_token(tmp_path, name="ann")
    admin = bearer(make_token(tmp_path, name="admin"))
    assert_problem(guarded.get("/events"), 401)
    headers = bearer(token) if proof == "bearer" else {}
    if proof == "cookie":
        guarded.post("/session", json={"token": token})
    with guarded.stream("GET", "/events", headers=headers) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 1000"
        assert guarded.post("/runs", json={}, headers=admin).status_code == 201
        assert any(line.startswith("data: ") for line in lines), "the counter-test: it streams while the token holds"
        revoke(tmp_path, "ann")
        address = str(guarded.base_url).rstrip("/") + "/runs"
        submitter = threading.Thread(target=lambda: httpx.post(address, json={}, headers=admin, trust_env=False))
        submitter.start()
        rest = [line for line in lines if line.startswith("data: ")]
        submitter.join()

    assert len(rest) <= 2, "what was on its way when the token was revoked, and then the end"


# -- how much one caller creates ---------------------------------------------------------------------------------------


def test_work_beyond_a_callers_rate_is_429_with_a_time_and_reading_goes_on(make_client: Serve, tmp_path: Path) -> None:
    client = make_client(submit_rate_per_s=0.001, submit_burst=2)
    ann, bob = (bearer(make_token(tmp_path, "submit", name)) for name in ("ann", "bob"))
    answers = [client.post("/runs", json={}, headers=ann).status_code for _ in range(2)]
    refused = client.post("/experiments", json={"builtin": "calm-boom"}, headers=ann)

    assert answers == [201, 201]
    assert "MUONSCOPE_SUBMIT_RATE_PER_S" in assert_problem(refused, 429)["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    assert len(client.get("/runs", headers=ann).json()["runs"]) == 2
    run_id = client.get("/runs", headers=ann).json()["runs"][0]["id"]
    assert client.post(f"/runs/{run_id}/stop", headers=ann).status_code == 202, "what ends work is not held back"
    # Each caller has a bucket of their own; who shows no token shares the address's.
    assert client.post("/runs", json={}, headers=bob).status_code == 201
    assert [client.post("/runs", json={}).status_code for _ in range(3)] == [201, 201, 429]


def test_an_address_that_leads_nowhere_tells_a_stranger_nothing(guarded: httpx.Client, tmp_path: Path) -> None:
    assert_problem(guarded.get("/runs/nosuchrun"), 401)
    assert_problem(guarded.get("/runs/nosuchrun", headers=bearer(make_token(tmp_path, "read"))), 404)


def test_a_large_body_of_a_stranger_is_answered_and_not_kept(guarded: httpx.Client) -> None:
    body = b"x" * (8 * 1024 * 1024)

    assert_problem(guarded.post("/imports/steps?name=a", content=body), 401)


def test_the_reference_of_the_api_runs_no_script_and_asks_no_other_host(client: httpx.Client) -> None:
    page = client.get("/docs")

    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert not any(word in page.text for word in ("<script", "src=", "<link", "<img", "url("))
    # Addresses in examples are text; the one link leads to the document.
    assert re.findall(r'href="([^"]*)"', page.text) == ["/openapi.json"]
    assert all(path in page.text for path in client.get("/openapi.json").json()["paths"])
    assert '<span class="scope">admin</span>' in page.text


def test_a_repeat_is_answered_while_the_queue_drains_and_a_new_run_is_not(client: httpx.Client) -> None:
    first = client.post("/runs", json={}, headers={"Idempotency-Key": "k"})
    client.post("/queue/drain")
    repeat = client.post("/runs", json={}, headers={"Idempotency-Key": "k"})

    assert (repeat.status_code, repeat.json()["id"]) == (200, first.json()["id"])
    assert_problem(client.post("/runs", json={}, headers={"Idempotency-Key": "new"}), 503)
    assert_problem(client.post("/experiments", json={"builtin": "calm-boom"}), 503)
    assert len(client.get("/runs").json()["runs"]) == 1
