"""What each call sends, and how its answer reads."""

import json
import math

import httpx
import pytest

from muonscope.client import Client, calls
from muonscope.client.calls import Call
from muonscope.contract.run_spec import ByteGptTask, OptimizerSettings, RunSpec
from muonscope.contract.status import Verdict
from tests.unit.client.fake_service import DIED, FakeService, run_json


def test_a_submitted_spec_travels_as_json_with_a_key_of_its_own(client: Client, service: FakeService) -> None:
    service.answers["POST", "/runs"] = httpx.Response(201, json=run_json())

    run = client.runs.submit({"name": "first", "steps": 30})

    (request,) = service.requests
    assert run.id == "r1"
    assert json.loads(request.content) == {"name": "first", "steps": 30}
    assert len(request.headers["Idempotency-Key"]) == 36


def test_two_submissions_have_different_keys_and_a_given_key_is_kept(client: Client, service: FakeService) -> None:
    service.answers["POST", "/runs"] = run_json()

    client.runs.submit({})
    client.runs.submit({})
    client.runs.submit({}, idempotency_key="mine")

    first, second, third = (request.headers["Idempotency-Key"] for request in service.requests)
    assert first != second
    assert third == "mine"


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(),
        RunSpec(task=ByteGptTask(), steps=3),
        RunSpec(task=ByteGptTask(num_layers=4), optimizer=OptimizerSettings(lr=0.05)),
        RunSpec.model_validate({"deepspeed": {"version": "0.19.2"}, "step_ordering": "master"}),
    ],
)
def test_a_typed_spec_arrives_as_the_same_spec(spec: RunSpec) -> None:
    sent = json.loads(json.dumps(calls.submit_run(spec).body))

    assert RunSpec.model_validate(sent) == spec


def test_a_typed_spec_says_only_what_was_said() -> None:
    assert calls.submit_run(RunSpec(steps=3)).body == {"steps": 3}


def test_a_run_reads_its_non_finite_numbers_and_ignores_later_fields(client: Client, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(**DIED)

    run = client.runs.get("r1")

    assert run.verdict is not None
    assert run.verdict.name is Verdict.DIES
    assert run.summary.last_momentum_norm is not None
    assert math.isnan(run.summary.last_momentum_norm)
    assert run.summary.last_loss is None


def test_non_finite_numbers_go_out_again_as_they_came(client: Client, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(**DIED)

    document = client.runs.get("r1").model_dump(mode="json")

    assert document["summary"]["last_momentum_norm"] == "NaN"


def test_a_run_of_a_later_version_parses_although_its_spec_does_not(client: Client, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(spec={"name": "first", "a_later_field": 1})

    run = client.runs.get("r1")

    assert run.spec["a_later_field"] == 1
    with pytest.raises(ValueError, match="a_later_field"):
        run.run_spec()


@pytest.mark.parametrize("run_id", ["a/b", "../runs", "a?b=c", "a#b", "ü", "%2e%2e", "a b"])
def test_an_id_stays_one_segment_of_the_path(run_id: str, client: Client, service: FakeService) -> None:
    service.answers["GET", f"/runs/{run_id}"] = run_json(run_id)

    assert client.runs.get(run_id).id == run_id
    assert service.requests[0].url.raw_path.count(b"/") == 2


@pytest.mark.parametrize("run_id", ["", ".", ".."])
def test_what_cannot_be_an_id_is_refused_before_anything_is_sent(
    run_id: str, client: Client, service: FakeService
) -> None:
    with pytest.raises(ValueError, match="not an id"):
        client.runs.get(run_id)

    assert service.requests == []


def test_all_runs_are_listed_over_all_pages(client: Client, service: FakeService) -> None:
    pages = {None: (["a", "b"], "two"), "two": (["c"], None)}

    def answer(request: httpx.Request) -> httpx.Response:
        ids, cursor = pages[request.url.params.get("cursor")]
        return httpx.Response(200, json={"runs": [run_json(each) for each in ids], "next_cursor": cursor})

    service.answers["GET", "/runs"] = answer

    assert [run.id for run in client.runs.list("status:queued")] == ["a", "b", "c"]
    assert all(request.url.params["q"] == "status:queued" for request in service.requests)


def test_steps_are_read_from_where_each_page_ended(client: Client, service: FakeService) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        start = int(request.url.params["start"])
        steps = [{"step": step, "overflow": False, "discarded": False} for step in range(start, min(start + 2, 5))]
        return httpx.Response(200, json={"steps": steps, "next_start": start + 2 if start + 2 < 5 else None})

    service.answers["GET", "/runs/r1/steps"] = answer

    assert [step.step for step in client.runs.steps("r1")] == [0, 1, 2, 3, 4]
    assert [request.url.params["start"] for request in service.requests] == ["0", "2", "4"]


def test_infinity_nan_and_not_measured_stay_three_things(client: Client, service: FakeService) -> None:
    step = {"step": 0, "overflow": True, "discarded": True, "momentum_norm": "Infinity", "loss": "NaN", "lr": None}
    service.answers["GET", "/runs/r1/steps"] = {"steps": [step], "next_start": None}

    (read,) = client.runs.steps("r1")

    assert read.momentum_norm == math.inf
    assert read.loss is not None
    assert math.isnan(read.loss)
    assert read.lr is None


def test_series_come_in_columns(client: Client, service: FakeService) -> None:
    service.answers["GET", "/runs/r1/steps"] = {"series": {"step": [0, 1], "loss": [1.0, "NaN"]}, "exact": True}

    series = client.runs.series("r1", ["step", "loss"], max_points=50)

    assert series.series["step"] == [0, 1]
    assert dict(service.requests[0].url.params) == {"max_points": "50", "fields": "step,loss"}


def test_a_matrix_and_a_builtin_experiment_are_both_asked_for_by_name(client: Client, service: FakeService) -> None:
    service.answers["POST", "/experiments"] = {"id": "e1", "name": "mine", "runs": []}

    client.experiments.create("mine", RunSpec(steps=3), {"zero_stage": (1, 2)})
    client.experiments.create_builtin("byte-gpt", text="/data")

    bodies = [json.loads(request.content) for request in service.requests]
    assert bodies == [
        {"name": "mine", "base": {"steps": 3}, "matrix": {"zero_stage": [1, 2]}},
        {"builtin": "byte-gpt", "text": "/data"},
    ]


def test_one_parameters_norms_are_read_over_all_pages(client: Client, service: FakeService) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        start = int(request.url.params["start"])
        steps = [{"step": start, "momentum_norm": "NaN" if start else 1.5}]
        return httpx.Response(200, json={"steps": steps, "next_start": 1 if start == 0 else None})

    service.answers["GET", "/runs/r1/parameters/3/steps"] = answer

    first, second = client.runs.parameter_steps("r1", 3)

    assert (first.step, first.momentum_norm, second.step) == (0, 1.5, 1)
    assert second.momentum_norm is not None
    assert math.isnan(second.momentum_norm)


def test_csv_comes_in_pieces_as_the_service_wrote_it(client: Client, service: FakeService) -> None:
    service.answers["GET", "/runs/r1/steps"] = httpx.Response(200, text="step,loss\r\n0,nan\r\n")

    assert "".join(client.runs.csv("r1", start=5)) == "step,loss\r\n0,nan\r\n"
    assert dict(service.requests[0].url.params) == {"format": "csv", "start": "5"}


def test_a_clone_that_was_cut_off_stays_one_run(client: Client, service: FakeService, pauses: list[float]) -> None:
    service.failures = [httpx.ReadError("cut")]
    service.answers["POST", "/runs/r1/clone"] = run_json("r2")

    assert client.runs.clone("r1").id == "r2"
    assert len({request.headers["Idempotency-Key"] for request in service.requests}) == 1


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [
        (calls.stop_run("r1"), "POST", "/runs/r1/stop"),
        (calls.retry_run("r1"), "POST", "/runs/r1/retry"),
        (calls.clone_run("r1"), "POST", "/runs/r1/clone"),
        (calls.list_parameters("r1"), "GET", "/runs/r1/parameters"),
        (calls.list_parameter_steps("r1", 3), "GET", "/runs/r1/parameters/3/steps"),
        (calls.list_events("r1"), "GET", "/runs/r1/events"),
        (calls.get_logs("r1"), "GET", "/runs/r1/logs"),
        (calls.compare_runs("a", "b"), "GET", "/compare"),
        (calls.get_experiment_table("e1", "csv"), "GET", "/experiments/e1.csv"),
        (calls.get_cluster(), "GET", "/cluster"),
    ],
)
def test_a_call_goes_where_the_api_has_it(call: Call[object], method: str, path: str) -> None:
    assert (call.method, call.path) == (method, path)


def test_a_token_is_sent_and_none_where_there_is_none(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    service.answers["GET", "/cluster"] = {}
    Client("http://service", transport=service.transport).cluster()
    monkeypatch.setenv("MUONSCOPE_TOKEN", "secret")
    Client("http://service", transport=service.transport).cluster()

    without, with_token = service.requests
    assert "Authorization" not in without.headers
    assert with_token.headers["Authorization"] == "Bearer secret"


def test_the_address_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client().url == "http://127.0.0.1:8800"
    monkeypatch.setenv("MUONSCOPE_URL", "http://elsewhere:9/")

    assert Client().url == "http://elsewhere:9"
    assert Client("http://given").url == "http://given"
