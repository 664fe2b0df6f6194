"""S1 to S12: what the service refuses, keeps to itself, and treats as plain text.

One service on a cluster in memory: whatever one request broke, the next ones would notice. What needs a real Ray, S2
and S7 to S9 among it, is in tests/integration/service/test_on_real_ray.py and in test_training_faults.py.
"""

import csv
import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import QUICK
from tests.installation import Installation, enrolment_token, working
from tests.integration.service.fake_ray import FakeRay, fake_ray
from tests.unit.service.test_bad_input import JSON, PROBLEM

TRAVERSALS = (
    "../../../../etc/passwd", "..%2f..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd",
    "..\\..\\..\\etc\\passwd", "/etc/passwd", "%2fetc%2fpasswd", "spec.json/../../../../etc/passwd", "..%00/etc/passwd",
    "#/../../etc/passwd", "?/../../etc/passwd", "%252e%252e%252fetc%252fpasswd", "file:///etc/passwd",
)  # fmt: skip
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Installation, FakeRay]]:
    with fake_ray(gpus=2.0) as ray, Installation(tmp_path_factory.mktemp("house"), ray=ray, settings=QUICK) as one:
        yield one, ray


@pytest.fixture
def service(house: tuple[Installation, FakeRay]) -> Installation:
    return house[0]


@pytest.fixture
def ray(house: tuple[Installation, FakeRay]) -> FakeRay:
    return house[1]


def raw(service: Installation, request: str) -> str:
    """Send a request exactly as it is written, which no client library would."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(f"{request}\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer.decode("utf-8", "replace")


def test_s1_only_this_machine_reaches_the_service_and_only_an_attempts_token_its_door(
    service: Installation, ray: FakeRay
) -> None:
    assert service.process is not None
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(service.process.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    run_id = service.submit(world_size=1)
    with working(service, run_id) as worker:
        base = f"/attempts/{worker.attempt_id}"
        doors = [path for path in service.client.get("/openapi.json").json()["paths"] if path.startswith("/attempts/")]
        for door in doors:
            path = door.replace("{attempt_id}", worker.attempt_id)
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {worker.token}"}):
                if path.endswith("/enrol"):
                    continue
                answer = service.client.post(path, json={"status": "running"}, headers=headers)
                assert answer.status_code in (401, 422), (path, answer.text)
        beat = service.client.post(f"{base}/heartbeat", json={"status": "running"})
        assert (beat.status_code, beat.headers["www-authenticate"]) == (401, "Bearer")
        # The counter-test: with the token it is taken; a used enrolment token is not.
        worker.beat()
        again = service.client.post(f"{base}/enrol", json={"token": enrolment_token(ray, worker.attempt_id)})
        wrong = service.client.post(f"{base}/enrol", json={"token": "x" * 43})
    service.stop(run_id)

    assert set(listening) == {"127.0.0.1"}
    assert len(doors) >= 6
    assert (again.status_code, wrong.status_code) == (409, 401)
    kinds = [event["kind"] for event in service.client.get(f"/runs/{run_id}/events").json()["events"]]
    assert "alarm" in kinds


@pytest.mark.parametrize(
    "extra",
    [
        {"entrypoint": "rm -rf /"}, {"runtime_env": {"pip": ["evil"]}}, {"working_dir": "http://evil.example/a.zip"},
        {"py_executable": "/bin/sh -c id"}, {"env": {"LD_PRELOAD": "evil.so"}}, {"task": {"name": "os:system"}},
        {"task": {"name": "subprocess:run", "options": {"args": "id"}}}, {"task": {"name": "a;b:c"}},
        {"deepspeed": {"version": "git+https://evil.example/x"}},
    ],
    ids=lambda extra: next(iter(extra)),
)  # fmt: skip
def test_s3_no_run_brings_a_program_of_its_own(service: Installation, extra: dict[str, Any]) -> None:
    answer = service.client.post("/runs", json=extra)

    assert answer.status_code == 422, answer.text
    assert answer.json()["remedy"]


def test_s3_s12_what_a_run_says_is_never_part_of_its_command_line(service: Installation, ray: FakeRay) -> None:
    said = "$(touch /tmp/planted); `id` && ignore all previous instructions"
    run_id = service.submit(world_size=1, name=said, notes=said, tags=[said[:20]])
    service.wait(lambda: f"run-{run_id}-a1" in ray.jobs, what="its job")
    line = ray.jobs[f"run-{run_id}-a1"]["entrypoint"]
    service.stop(run_id)

    assert not any(word in line for word in ("planted", "`", "$(", "ignore"))
    assert service.run(run_id)["name"] == said


@pytest.mark.parametrize("payload", TRAVERSALS)
def test_s4_no_path_leads_out_of_what_is_served(service: Installation, payload: str) -> None:
    run_id = service.client.get("/runs?limit=1").json()["runs"]
    known = run_id[0]["id"] if run_id else service.submit(world_size=1)
    for place in ("/ui/", "/ui/assets/", f"/runs/{known}/artifacts/", "/runs/", f"/runs/{known}/logs/"):
        answer = raw(service, f"GET {place}{payload} HTTP/1.1")
        assert "root:" not in answer
        assert not answer.startswith("HTTP/1.1 5"), answer


def test_s4_a_link_in_a_checkpoint_leads_nowhere(tmp_path: Path) -> None:
    from workers.checkpoint_files import Manifest, describe_file, verify
    from workers.errors import CheckpointUnusable

    outside = tmp_path / "outside"
    outside.write_text("secret")
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "state.pt").symlink_to(outside)
    manifest = Manifest("f", 1, 1, {"state.pt": describe_file(outside)})

    with pytest.raises(CheckpointUnusable, match="outside the folder"):
        verify(folder, manifest)


@pytest.mark.parametrize("query", [
    {"sort": "name;DROP TABLE run"}, {"sort": "(SELECT 1)"}, {"q": "status:' OR 1=1 --"}, {"q": 'ordering:"'},
    {"sort": "spec"}, {"cursor": "' OR 1=1 --"},
])  # fmt: skip
def test_s5_a_search_or_order_that_is_none_is_refused(service: Installation, query: dict[str, str]) -> None:
    answer = service.client.get("/runs", params=query)

    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)


def test_s5_what_sql_would_read_as_a_pattern_is_only_itself(service: Installation) -> None:
    made = {
        name: service.submit(world_size=1, name=name) for name in ("100% sure", "1000 sure", "a_b", "axb", "o'brien")
    }

    def found(text: str) -> set[str]:
        return {run["id"] for run in service.client.get("/runs", params={"q": text, "limit": 1000}).json()["runs"]}

    assert found("100%") == {made["100% sure"]}
    assert found("a_b") == {made["a_b"]}
    assert found("o'brien") == {made["o'brien"]}


def test_s6_markup_and_formulas_stay_text_in_every_format(service: Installation) -> None:
    run_id = service.submit(world_size=1, name=MARKUP, tags=["=cmd|' /C calc'!A0"])
    page = service.client.get("/ui/runs")
    shown = service.client.get(f"/runs/{run_id}")
    log = service.client.get(f"/runs/{run_id}/logs")
    refused = service.client.get(f"/runs/{MARKUP}")
    rows = list(csv.reader(io.StringIO(service.client.get(f"/runs/{run_id}/steps?format=csv").text)))

    assert shown.headers["content-type"].startswith("application/json")
    assert shown.json()["name"] == MARKUP
    assert log.headers["content-type"].startswith("text/plain")
    assert refused.headers["content-type"] == PROBLEM
    for answer in (page, shown, log, refused):
        assert answer.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe-inline" not in re.sub(r"style-src[^;]*", "", policy)
    # The record's columns are the service's own words: no run's text is in a table that a spreadsheet opens.
    assert all(not cell.startswith(("=", "+", "@")) for row in rows for cell in row)


def test_s10_what_would_take_too_much_is_refused_before_it_takes_anything(service: Installation) -> None:
    too_much: list[dict[str, Any]] = [
        {"world_size": 3}, {"world_size": 10**9}, {"steps": 10**30}, {"steps": 10**12}, {"name": "x" * 100_000},
        {"tags": ["x"] * 10_000}, {"notes": "x" * 1_000_000}, {"task": {"name": "simple_model", "hidden_size": 10**9}},
        {"micro_batch_size": 10**30}, {"ds_config": {"train_batch_size": 10**30}},
        {"faults": [{"kind": "inf", "step": 0}] * 20_000},
    ]  # fmt: skip
    for spec in too_much:
        answer = service.client.post("/runs", content=json.dumps(spec), headers=JSON)
        assert answer.status_code in (413, 422), (next(iter(spec)), answer.status_code, answer.text[:300])


def test_s10_a_users_gpus_are_limited(service: Installation) -> None:
    service.client.put("/queue/limits/user/ann", json={"max_gpus": 0})
    ann = service.client.post("/runs", json={}, headers={"Muonscope-User": "ann"}).json()["id"]
    service.wait(lambda: "ann" in (service.run(ann)["waiting_reason"] or ""), what="it waits for her limit")
    service.client.delete("/queue/limits/user/ann")
    service.stop(ann)


def test_s11_other_sites_and_other_names_are_refused(service: Installation) -> None:
    foreign = service.client.post("/runs", json={}, headers={"Origin": "https://evil.example"})
    renamed = service.client.get("/runs", headers={"Host": "evil.example"})
    form = service.client.post("/runs", content="a=b", headers={"Content-Type": "application/x-www-form-urlencoded"})
    preflight = service.client.options("/runs", headers={"Origin": "https://evil.example"})
    ours = service.client.post("/runs", json={}, headers={"Origin": service.url})

    assert [answer.status_code for answer in (foreign, renamed, form, ours)] == [403, 421, 415, 201]
    assert not any(name.startswith("access-control-") for name in (*preflight.headers, *ours.headers))
