"""Running an experiment: its table, the published check, and the exit code."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from muonscope.cli.experiment_verbs import _dashboard
from muonscope.cli.experiment_views import experiment_exit_code
from muonscope.client import Experiment
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import DIED, TRAINED, FakeService, problem, run_json


def thirty_step_run(ordering: str, power: int, end: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "name": f"{ordering} at 2^{power}",
        "step_ordering": ordering,
        "loss_scale": {"initial_power": power},
        "steps": 30,
    }
    return run_json(f"{ordering}-{power}", name=spec["name"], spec=spec, **end)


def experiment_json(
    *runs: dict[str, Any], name: str = "thirty-step", is_published: bool = True, differences: Sequence[str] = ()
) -> dict[str, Any]:
    check = {"matches": not differences, "differences": list(differences)} if is_published else None
    return {
        "id": "e1",
        "name": name,
        "builtin": name,
        "status": "succeeded",
        "runs": list(runs),
        "table": {
            "columns": ["ordering", "status", "largest weight motion", "momentum finite"],
            "rows": [[run["spec"]["step_ordering"], run["status"], "NaN", True] for run in runs],
            "run_ids": [run["id"] for run in runs],
            "published": [check for _ in runs],
        },
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
    assert re.split("  +", header) == ["ordering", "status", "largest weight motion", "momentum finite", "published"]
    assert master.split() == ["master", "failed", "nan", "yes", "pass"]
    assert ordered.split() == ["ordered", "succeeded", "nan", "yes", "pass"]
    assert result.err.splitlines()[-1].endswith("/ui/experiments/e1")


OWN = "name: mine\nbase: {steps: 4, task: {name: 'mine:build'}}\nmatrix: {step_ordering: [master, ordered]}\n"


def test_an_experiment_of_ones_own_is_run_from_its_file_and_ends_by_its_worst_verdict(
    command: RunCommand, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = experiment_json(
        thirty_step_run("master", 16, DIED), thirty_step_run("ordered", 16, TRAINED), name="mine", is_published=False
    )
    service.answers["POST", "/experiments"] = service.answers["GET", "/experiments/e1"] = own
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://package.zip"}}')
    (tmp_path / "mine.yaml").write_text(OWN)

    result = command("experiment", "run", str(tmp_path / "mine.yaml"))

    assert (result.code, result.out.splitlines()[0]) == (3, "mine (e1)")
    (asked,) = (json.loads(request.content) for request in service.requests if request.method == "POST")
    assert asked == {
        "name": "mine",
        "base": {"steps": 4, "task": {"name": "mine:build"}, "working_dir": "gcs://package.zip"},
        "matrix": {"step_ordering": ["master", "ordered"]},
    }


def test_an_experiments_file_is_refused_before_anything_is_asked(
    command: RunCommand, service: FakeService, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(OWN.replace("matrix", "matrx"))
    (tmp_path / "good.yaml").write_text(OWN)

    wrong = command("experiment", "run", str(tmp_path / "mine.yaml"))
    both = command("experiment", "run", str(tmp_path / "good.yaml"), "--deepspeed", "0.19.2")

    assert (wrong.code, both.code, service.requests) == (1, 2, [])
    assert "matrx" in wrong.err
    assert "put it under base" in " ".join(both.err.split())


def test_a_master_run_that_trains_is_not_as_published(command: RunCommand, service: FakeService) -> None:
    wrong = experiment_json(
        thirty_step_run("master", 16, TRAINED), differences=["verdict is trains, published dies", "overflows is 2"]
    )
    service.answers["POST", "/experiments"] = wrong
    service.answers["GET", "/experiments/e1"] = wrong

    result = command("experiment", "run", "thirty-step")

    assert result.code == 3
    assert "fail: verdict is trains, published dies; overflows is 2" in result.out


def test_json_carries_the_check_of_each_run(command: RunCommand, service: FakeService) -> None:
    service.answers["POST", "/experiments"] = AS_PUBLISHED
    service.answers["GET", "/experiments/e1"] = AS_PUBLISHED

    result = command("experiment", "run", "thirty-step", "--json")

    document = json.loads(result.out)
    assert [check["matches"] for check in document["table"]["published"]] == [True, True]
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
    assert "stopped ordered-16 (ordered at 2^16)" in result.err
    assert "stopped 1 of experiment e1's 2 runs; 1 had ended" in result.err
    assert "`muonscope experiment show e1`" in result.err
    assert "master-16" not in result.err


def test_a_run_that_ends_by_itself_meanwhile_keeps_no_other_from_being_stopped(
    command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    names = ("master", "ordered")
    going = experiment_json(*(thirty_step_run(name, 16, {"status": "running"}) for name in names))
    service.answers["POST", "/experiments"] = going
    service.answers["GET", "/experiments/e1"] = going
    service.answers["POST", "/runs/master-16/stop"] = problem(409, "run master-16 has succeeded already")
    service.answers["POST", "/runs/ordered-16/stop"] = run_json("ordered-16", status="running")
    monkeypatch.setattr("time.sleep", interrupt)

    result = command("experiment", "run", "thirty-step")

    assert result.code == 130
    assert "stopped ordered-16 (ordered at 2^16)" in result.err
    assert "stopped 1 of experiment e1's 2 runs; 1 had ended" in result.err


def test_show_prints_the_table_as_it_stands(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/experiments/e1"] = AS_PUBLISHED

    assert "ordered   succeeded  nan" in command("experiment", "show", "e1").out


def experiment(*runs: dict[str, Any], is_published: bool = True) -> Experiment:
    return Experiment.model_validate(experiment_json(*runs, is_published=is_published))


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
    assert experiment_exit_code(experiment(run_json(**TRAINED), run_json("r2", **end), is_published=False)) == code


def test_a_worker_that_died_is_a_failure_and_never_as_published() -> None:
    lost = DIED | {"failure": {"kind": "worker_died"}}

    assert experiment_exit_code(experiment(thirty_step_run("master", 16, lost))) == 1


def test_a_run_that_differs_from_what_is_published_is_another_verdict_although_it_trains() -> None:
    wrong = experiment_json(run_json(**TRAINED), differences=["verdict is trains, published dies"])

    assert experiment_exit_code(Experiment.model_validate(wrong)) == 3


def test_experiments_are_listed_over_all_pages(command: RunCommand, service: FakeService) -> None:
    first, second = AS_PUBLISHED, AS_PUBLISHED | {"id": "e0"}
    service.answers["GET", "/experiments"] = [
        {"experiments": [first], "next_cursor": 1},
        {"experiments": [second], "next_cursor": None},
    ]

    lines = command("experiment", "ls").out.splitlines()

    assert [line.split()[0] for line in lines] == ["experiment", "e1", "e0"]


def test_the_dashboard_of_a_service_that_ends_is_said_with_the_command_that_serves_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "http://127.0.0.1:8800/ui/experiments/e1"

    assert _dashboard(address, None) == f"dashboard: {address}"
    assert "MUONSCOPE_HOME=/data/m muonscope up" in _dashboard(address, Path("/data/m"))
    assert "`muonscope up`" in _dashboard(address, Path("~/.muonscope").expanduser())
    monkeypatch.setattr("sys.argv", ["/a b/bin/muonscope", "experiment", "run"])
    assert "`'/a b/bin/muonscope' up`" in _dashboard(address, Path("~/.muonscope").expanduser())
