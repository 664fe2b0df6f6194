"""Bad and hostile input: a 4xx problem document naming field, value and remedy; nothing stored; never a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx import Client, Response

from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving

PROBLEM = "application/problem+json"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One service for all that must be refused: what one request breaks, the next ones notice."""
    with serving(tmp_path_factory.mktemp("home"), FakeLauncher(2.0)) as client:
        yield client


def assert_problem(response: Response, status: int, *, field: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    problem: dict[str, Any] = response.json()
    assert set(problem) >= {"type", "title", "status", "detail", "field", "value", "remedy"}
    assert problem["status"] == status
    assert problem["detail"]
    assert problem["remedy"]
    assert len(response.content) < 20_000
    if field is not None:
        assert problem["field"] == field
    return problem


def assert_nothing_is_stored(client: Client) -> None:
    assert client.get("/runs").json()["runs"] == []


@pytest.mark.parametrize(
    ("spec", "field", "value", "remedy"),
    [
        ({"zero_stagee": 1}, "zero_stagee", 1, "did you mean zero_stage? else remove it"),
        ({"stepz": 3}, "stepz", 3, "did you mean steps? else remove it"),
        ({"optimizer": {"stepz": 3}}, "optimizer.stepz", 3, "did you mean ns_steps? else remove it"),
        ({"initial_powr": 3}, "initial_powr", 3, "remove it; see /openapi.json for the known fields"),
        ({"task": {"name": "byte_gpt", "head": 1}}, "task.head", 1, "did you mean num_heads? else remove it"),
        ({"faults": [{"kind": "inf", "step": 0, "rnk": 3}]}, "faults[0].rnk", 3, "did you mean rank? else remove it"),
        ({"loss_scale": {"initial": 3}}, "loss_scale.initial", 3, "did you mean initial_power? else remove it"),
        ({"zzz": 1}, "zzz", 1, "remove it; see /openapi.json for the known fields"),
        ({"zero_stage": 7}, "zero_stage", 7, "use 3 or less"),
        ({"world_size": 0}, "world_size", 0, "use 1 or more"),
        ({"world_size": 3}, "world_size", 3, "use at most 2"),
        ({"steps": -1}, "steps", -1, "use 1 or more"),
        ({"loss_scale": {"initial_power": -1}}, "loss_scale.initial_power", -1, "use 0 or more"),
        (
            {"task": {"name": "no_such"}}, "task.name", "no_such",
            "use one of simple_model, calm_boom, matrix_pair, byte_gpt, or an allow-listed module:function",
        ),
        (
            {"task": {"name": "byte_gtp"}}, "task.name", "byte_gtp",
            "did you mean byte_gpt? else use one of simple_model, calm_boom, matrix_pair, byte_gpt, or an allow-listed "
            "module:function",
        ),
        ({"task": "byte_gpt"}, "task", "byte_gpt", 'write task: {"name": "byte_gpt"}'),
        ({"task": "mine:build"}, "task", "mine:build", 'write task: {"name": "mine:build"}'),
        ({"task": "byte_gtp"}, "task.name", "byte_gtp", None),
        ({"steps": 4, "faults": [{"kind": "inf", "step": 4}]}, "faults[0].step", 4, None),
        ({"task": {"name": "os:system"}}, "task.name", "os:system", None),
        ({"task": {"name": "simple_model", "hidden_size": 0}}, "task.hidden_size", 0, "use 1 or more"),
        ({"steps": "many"}, "steps", "many", "give an integer"),
        ({"steps": 1.5}, "steps", 1.5, "give an integer"),
        ({"steps": None}, "steps", None, "give an integer"),
        ({"seed": 10**18 * 10}, "seed", "an integer of 64 bits", None),
        ({"precision": "fp8"}, "precision", "fp8", None),
        ({"faults": [{"kind": "inf", "step": 0, "rank": 3}]}, "faults[0].rank", 3, None),
        ({"faults": [{"kind": "minus", "step": 0}]}, "faults[0].kind", "minus", None),
        ({"ds_config": {"fp16": {}}}, "ds_config.fp16", "{}", "remove it from ds_config"),
        ({"ds_config": {"zero_allow_untested": 1}}, "ds_config.zero_allow_untested", 1, None),
        ({"ds_config": {"communication_data_type": "auto"}}, "ds_config.communication_data_type", "auto", None),
        ({"ds_config": {"zero_optimization": {"overlap": True}}}, "ds_config.zero_optimization.overlap", True, None),
        ({"name": ""}, "name", "", "give the run a name"),
        ({"name": "a" * 201}, "name", None, "use at most 200 characters"),
        ({"name": "a\x00b"}, "name", None, "remove it"),
        ({"tags": "one"}, "tags", "one", "give a list"),
        ([1, 2], "body", "[1, 2]", "give an object"),
        ("text", "body", "text", "give an object"),
        ({"implementation": "deepspeed", "step_ordering": "ordered"}, "step_ordering", "ordered", None),
    ],
)  # fmt: skip
def test_a_bad_spec_is_refused_by_name(
    refusing: Client, spec: Any, field: str | None, value: Any, remedy: str | None
) -> None:
    problem = assert_problem(refusing.post("/runs", json=spec), 422, field=field)
    if value is not None:
        assert problem["value"] == value
    if remedy is not None:
        assert problem["remedy"] == remedy
    assert_nothing_is_stored(refusing)


@pytest.mark.parametrize("spec", [{"stepz": 3}, {"optimizer": {"stepz": 3}}])
def test_an_unknown_field_is_called_one(refusing: Client, spec: Any) -> None:
    problem = assert_problem(refusing.post("/runs", json=spec), 422)

    assert problem["detail"] == f"{problem['field']}: unknown field"


def test_a_matrix_and_the_queue_offer_fields_of_their_own(refusing: Client) -> None:
    base = {"name": "e", "base": {"stepz": 3}, "matrix": {"seed": [0, 1]}}
    in_base = assert_problem(refusing.post("/experiments", json=base), 422)
    in_queue = assert_problem(refusing.post("/queue/pause", json={"wy": "repairs"}), 422, field="wy")

    assert in_base["remedy"] == "did you mean steps? else remove it"
    assert in_queue["remedy"] == "did you mean why? else remove it"


HOSTILE = {
    "empty": (b"", 422),
    "not json": (b"{steps: 3}", 400),
    "cut off": (b'{"steps": 3', 400),
    "not utf-8": (b'{"name": "\xff\xfe"}', 400),
    "a lone surrogate": (b'{"name": "\\ud800"}', 422),
    "a lone surrogate in a key": (b'{"\\ud800": 1}', 422),
    "a surrogate in options": (b'{"task": {"name": "a:b", "options": {"x": "\\udfff"}}}', 422),
    "NUL in a name": (b'{"name": "a\\u0000b"}', 422),
    "10^30": (b'{"steps": 1' + b"0" * 30 + b"}", 422),
    "10^400 as a float": (b'{"gradient_clipping": 1' + b"0" * 400 + b"}", 422),
    "five thousand digits": (b'{"steps": ' + b"9" * 5000 + b"}", 400),
    "1e999": (b'{"gradient_clipping": 1e999}', 422),
    "NaN": (b'{"gradient_clipping": NaN}', 422),
    "-Infinity": (b'{"optimizer": {"lr": -Infinity}}', 422),
    "NaN hidden in ds_config": (b'{"ds_config": {"a": [1, {"b": NaN}]}}', 422),
    "duplicate keys": (b'{"steps": 3, "steps": 4}', 400),
    "nested duplicate keys": (b'{"loss_scale": {"window": 3, "window": 4}}', 400),
    "a hundred thousand arrays deep": (b"[" * 100_000 + b"]" * 100_000, 400),
    "a hundred thousand objects deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    "five hundred deep": (b'{"ds_config": ' + b'{"a":' * 500 + b"1" + b"}" * 501, 400),
    "twenty deep in ds_config": (b'{"ds_config": ' + b'{"a":' * 20 + b"1" + b"}" * 21, 422),
    "a million tags": (b'{"tags": [' + b'"x",' * 200_000 + b'"x"]}', 422),
    "just over the limit": (b'{"notes": "' + b"x" * 1024 * 1024 + b'"}', 413),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_and_nothing_breaks(refusing: Client, name: str) -> None:
    body, status = HOSTILE[name]
    assert_problem(refusing.post("/runs", content=body, headers=JSON), status)
    assert_nothing_is_stored(refusing)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_other_doors_refuse_the_same_bodies(refusing: Client, name: str) -> None:
    for path in ("/experiments", "/attempts/run-abc-a1/enrol", "/attempts/run-abc-a1/outcome"):
        response = refusing.post(path, content=HOSTILE[name][0], headers=JSON)
        assert 400 <= response.status_code < 500, (path, response.text)


def test_what_looks_hostile_and_is_text_is_stored_as_text(client: Client) -> None:
    name = "<img src=x onerror=alert(1)>'; DROP TABLE run; -- $(rm -rf /) \u202e"
    stored = client.post("/runs", json={"name": name, "tags": ["%_", "=cmd"]})
    assert stored.status_code == 201
    shown = client.get(stored.headers["location"]).json()
    assert (shown["name"], shown["tags"]) == (name, ["%_", "=cmd"])


def test_nan_is_named_with_its_place(refusing: Client) -> None:
    problem = assert_problem(
        refusing.post("/runs", content=b'{"ds_config": {"a": [1, {"b": NaN}]}}', headers=JSON), 422
    )
    assert problem["field"] == "ds_config.a[1].b"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_a_body_that_is_not_sent_as_json_is_refused(refusing: Client, content_type: str) -> None:
    response = refusing.post("/runs", content=b"{}", headers={"Content-Type": content_type})
    assert_problem(response, 415, field="Content-Type")


def test_many_mistakes_are_all_listed(refusing: Client) -> None:
    problem = assert_problem(refusing.post("/runs", json={"steps": -1, "zero_stage": 7}), 422)
    assert {error["field"] for error in problem["errors"]} == {"steps", "zero_stage"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing/here", 404),
        ("GET", "/runs/nosuchrun", 404),
        ("GET", "/runs/" + "x" * 65, 422),
        ("GET", "/runs/..%2f..%2fetc%2fpasswd", 404),
        ("POST", "/runs/nosuchrun/stop", 404),
        ("GET", "/runs/nosuchrun/events", 404),
        ("GET", "/runs/nosuchrun/logs", 404),
        ("DELETE", "/runs", 405),
        ("PUT", "/healthz", 405),
        ("GET", "/runs?limit=0", 422),
        ("GET", "/runs?limit=lots", 422),
        ("GET", "/runs?sort=name;drop", 422),
        ("GET", "/runs?cursor=%FF%00", 422),
        ("GET", "/runs?q=status:nope", 422),
        ("GET", "/runs?q=%22", 422),
    ],
)
def test_a_bad_address_or_query_is_a_problem_document(refusing: Client, method: str, path: str, status: int) -> None:
    assert_problem(refusing.request(method, path), status)


def test_a_405_says_what_is_offered(refusing: Client) -> None:
    response = refusing.delete("/runs")
    assert set(response.headers["allow"].split(", ")) == {"GET", "POST"}
    assert "GET, POST" in response.json()["remedy"]
    # Not what is offered at /runs/{run_id}.
    assert refusing.options("/runs/validate").headers["allow"] == "POST"
    assert refusing.options("/queue").headers["allow"] == "GET"


def test_an_unknown_host_is_refused(refusing: Client) -> None:
    assert_problem(refusing.get("/runs", headers={"Host": "evil.example"}), 421, field="Host")
    assert refusing.get("/runs", headers={"Host": "localhost:1234"}).status_code == 200


def test_another_sites_page_cannot_post(client: Client) -> None:
    foreign = client.post("/runs", json={}, headers={"Origin": "https://evil.example"})
    assert_problem(foreign, 403, field="Origin")
    assert_nothing_is_stored(client)
    ours = client.post("/runs", json={}, headers={"Origin": str(client.base_url).rstrip("/")})
    assert ours.status_code == 201


def test_an_origin_that_is_no_address_is_another_site(refusing: Client) -> None:
    assert_problem(refusing.post("/runs", json={}, headers={"Origin": "http://["}), 403)


def test_every_answer_carries_its_security_headers(refusing: Client) -> None:
    for path in ("/runs", "/nothing", "/ui/"):
        headers = refusing.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


def test_a_mistake_of_ours_is_a_plain_500_without_its_inside(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a secret inside")

    monkeypatch.setattr("service.api.runs.present_runs", fail)
    response = client.get("/runs")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert [record.action for record in caplog.records if record.levelname == "ERROR"] == ["request_failed"]  # type: ignore[attr-defined]


def test_openapi_describes_problems_and_examples(refusing: Client) -> None:
    document = refusing.get("/openapi.json").json()
    post = document["paths"]["/runs"]["post"]
    assert "Problem" in json.dumps(post["responses"]["422"])
    assert post["requestBody"]["content"]["application/json"]["schema"]["examples"][0]["step_ordering"] == "ordered"
