"""Running an experiment: its table, the published check, and the exit code."""

import json
from typing import Any

import pytest

from muonscope.cli.experiment_views import differences, experiment_exit_code
from muonscope.client import Experiment, Run
from muonscope.contract.published import published_result
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import DIED, TRAINED, FakeService, run_json


def thirty_step_run(ordering: str, power: int, end: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "name": f"{ordering} at 2^{power}",
        "step_ordering": ordering,
        "loss_scale": {"initial_power": power},
        "steps": 30,
    }
    return run_json(f"{ordering}-{power}", name=spec["name"], spec=spec, **end)


def experiment_json(*runs: dict[str, Any], name: str = "thirty-step") -> dict[str, Any]:
    rows = [[run["spec"]["step_ordering"], run["status"]] for run in runs]
    return {
        "id": "e1",
        "name": name,
        "status": "succeeded",
        "runs": list(runs),
        "table": {"columns": ["ordering", "status"], "rows": rows},
    }


AS_PUBLISHED = experiment_json(thirty_step_run("master", 16, DIED), thirty_step_run("ordered", 16, TRAINED))


def test_an_experiment_as_published_ends_with_zero_although_a_run_died(
    command: RunCommand, service: FakeService
) -> None:
    service.answers["POST", "/experiments"] = AS_PUBLISHED
    service.answers["GET", "/experiments/e1"] = AS_PUBLISHED

    result = command("experiment", "run", "thirty-step")

    title, header, master, ordered = result.out.splitlines()[:4]
    assert result.code == 0
    assert title == "thirty-step (e1)"
    assert header.split() == ["ordering", "status", "published"]
    assert master.split() == ["master", "failed", "yes"]
    assert ordered.split() == ["ordered", "succeeded", "yes"]
    assert "/ui/experiments/e1" in result.err


def test_a_master_run_that_trains_is_not_as_published(command: RunCommand, service: FakeService) -> None:
    wrong = experiment_json(thirty_step_run("master", 16, TRAINED), thirty_step_run("ordered", 16, TRAINED))
    service.answers["POST", "/experiments"] = wrong
    service.answers["GET", "/experiments/e1"] = wrong

    result = command("experiment", "run", "thirty-step")

    assert result.code == 3
    assert "no: verdict trains, published dies" in result.out


def test_json_carries_the_check_of_each_run(command: RunCommand, service: FakeService) -> None:
    service.answers["POST", "/experiments"] = AS_PUBLISHED
    service.answers["GET", "/experiments/e1"] = AS_PUBLISHED

    result = command("experiment", "run", "thirty-step", "--json")

    document = json.loads(result.out)
    assert [check["matches"] for check in document["published"]] == [True, True]
    assert document["runs"][0]["summary"]["last_momentum_norm"] == "NaN"


def test_a_text_of_ones_own_is_named_by_its_absolute_path(
    command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    service.answers["POST", "/experiments"] = experiment_json(name="byte-gpt")
    service.answers["GET", "/experiments/e1"] = experiment_json(run_json(**TRAINED), name="byte-gpt")

    command("experiment", "run", "byte-gpt", "--text", "book.txt")

    body = json.loads(service.requests[1].content)
    assert body == {"builtin": "byte-gpt", "text": str(tmp_path / "book.txt")}


def test_a_named_service_that_is_away_is_an_error_and_none_is_started(command: RunCommand, no_service: None) -> None:
    result = command("experiment", "run", "thirty-step")

    assert result.code == 1
    assert "no service answers" in result.err
    assert "starting a service" not in result.err


def test_an_interrupted_experiment_stops_the_runs_that_still_go(
    command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    going = experiment_json(thirty_step_run("master", 16, DIED), thirty_step_run("ordered", 16, {"status": "running"}))
    service.answers["POST", "/experiments"] = going
    service.answers["GET", "/experiments/e1"] = going
    service.answers["POST", "/runs/ordered-16/stop"] = run_json("ordered-16", status="running")
    monkeypatch.setattr("time.sleep", interrupt)

    result = command("experiment", "run", "thirty-step")

    assert result.code == 130
    assert [path for path in service.paths() if path.endswith("/stop")] == ["POST /runs/ordered-16/stop"]


def test_show_prints_the_table_as_it_stands(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/experiments/e1"] = AS_PUBLISHED

    assert "ordered   succeeded  yes" in command("experiment", "show", "e1").out


def experiment(*runs: dict[str, Any], name: str = "thirty-step") -> Experiment:
    return Experiment.model_validate(experiment_json(*runs, name=name))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (TRAINED, 0),
        (DIED, 3),
        ({"status": "stopped"}, 130),
        ({"status": "failed", "failure": {"kind": "job_lost"}}, 1),
    ],
)
def test_an_experiment_of_which_nothing_is_published_ends_as_its_runs_do(end: dict[str, Any], code: int) -> None:
    assert experiment_exit_code(experiment(run_json(**TRAINED), run_json(**end), name="mine")) == code


def test_a_worker_that_died_is_a_failure_and_never_as_published() -> None:
    lost = DIED | {"failure": {"kind": "worker_died"}}

    assert experiment_exit_code(experiment(thirty_step_run("master", 16, lost))) == 1


@pytest.mark.parametrize(
    ("ordering", "end", "change", "difference"),
    [
        ("master", DIED, {"overflows": 16}, "overflows 16, published 17"),
        ("master", DIED, {"momentum_finite": True}, "momentum finite yes, published no"),
        ("master", DIED, {"parameters_moved": 10}, "parameters moved 10, published 0"),
        ("master", DIED, {"max_weight_motion": 1e-5}, "largest weight motion 1e-05, published 0 to 0"),
        ("master", DIED, {"final_loss_scale": 2.0}, "final loss scale 2, published 1"),
        ("ordered", TRAINED, {"max_weight_motion": 1e-5}, "largest weight motion 1e-05, published at least 0.1"),
        ("ordered", TRAINED, {"max_weight_motion": None}, "largest weight motion –, published at least 0.1"),
        ("ordered", TRAINED, {"max_weight_motion": "NaN"}, "largest weight motion nan, published at least 0.1"),
        ("ordered", TRAINED, {"parameters_moved": 5}, "parameters moved 5, published 10"),
    ],
)
def test_each_published_figure_is_held(
    ordering: str, end: dict[str, Any], change: dict[str, Any], difference: str
) -> None:
    run = Run.model_validate(thirty_step_run(ordering, 16, end | {"summary": end["summary"] | change}))
    published = published_result("thirty-step", run.run_spec())

    assert published is not None
    assert differences(published, run) == [difference]
