"""Each verb about runs: what it asks, what it prints, how it ends."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import DIED, TRAINED, FakeService, problem, run_json


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text("name: first\nsteps: 30\noptimizer: {lr: 1e-3}\n")
    return str(path)


def test_submit_prints_the_id_alone_so_that_a_script_can_take_it(
    command: RunCommand, service: FakeService, spec: str
) -> None:
    service.answers["POST", "/runs"] = run_json()

    result = command("submit", spec)

    assert (result.code, result.out) == (0, "r1\n")
    assert json.loads(service.requests[0].content) == {"name": "first", "steps": 30, "optimizer": {"lr": "1e-3"}}


def test_submit_as_json_is_the_run(command: RunCommand, service: FakeService, spec: str) -> None:
    service.answers["POST", "/runs"] = run_json()

    result = command("submit", spec, "--json")

    assert json.loads(result.out)["status"] == "queued"
    assert result.err == ""


def test_a_refused_spec_names_field_value_and_remedy(command: RunCommand, service: FakeService, spec: str) -> None:
    members = {
        "detail": "zero_stage must be 1, 2 or 3",
        "field": "zero_stage",
        "value": 7,
        "remedy": "choose 1, 2 or 3",
    }
    service.answers["POST", "/runs"] = problem(422, "The input is not valid", **members)

    result = command("submit", spec)

    assert result.code == 1
    assert result.out == ""
    assert result.err.splitlines() == [
        "muonscope: zero_stage must be 1, 2 or 3",
        "  field:  zero_stage",
        "  value:  7",
        "  remedy: choose 1, 2 or 3",
    ]


def test_an_error_as_json_can_be_read_by_a_script(command: RunCommand, service: FakeService) -> None:
    result = command("show", "nothing", "--json")

    error = json.loads(result.err)
    assert result.code == 1
    assert (error["error"], error["status"], error["remedy"]) == ("NotFound", 404, "look elsewhere")


def test_all_that_is_wrong_with_a_spec_is_told_at_once(command: RunCommand, service: FakeService, spec: str) -> None:
    first = {"detail": "steps: too few", "field": "steps", "value": 0, "remedy": "use 1 or more"}
    other = {
        "detail": "optimizer.rate: unknown field",
        "field": "optimizer.rate",
        "value": 1,
        "remedy": "did you mean lr?",
    }
    refused = problem(422, "The input is not valid", **first, errors=[first, other])
    service.answers["POST", "/runs"] = refused

    plain, as_json = command("submit", spec), command("submit", spec, "--json")

    assert plain.err.splitlines()[-2:] == [
        "  remedy: use 1 or more",
        "  also:   optimizer.rate: unknown field; did you mean lr?",
    ]
    assert [each["field"] for each in json.loads(as_json.err)["errors"]] == ["steps", "optimizer.rate"]


def test_without_a_service_the_remedy_is_to_start_one(command: RunCommand, no_service: None) -> None:
    result = command("ls")

    assert result.code == 1
    assert "no service answers at http://127.0.0.1:9" in result.err
    assert "muonscope up" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (TRAINED, 0),
        (DIED, 3),
        ({"status": "stopped"}, 130),
        ({"status": "failed", "failure": {"kind": "worker_died", "message": "killed"}}, 1),
    ],
)
@pytest.mark.parametrize("verb", ["run", "watch"])
def test_run_and_watch_end_by_the_runs_outcome(
    verb: str, end: dict[str, Any], code: int, command: RunCommand, service: FakeService, spec: str
) -> None:
    service.answers["POST", "/runs"] = run_json()
    service.answers["GET", "/runs/r1"] = [run_json(), run_json(**end)]

    result = command(verb, spec if verb == "run" else "r1")

    assert result.code == code
    assert result.out.startswith(f"first: {end['status']}")


def test_a_death_says_the_step_and_that_nothing_moved(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(**DIED)

    assert command("watch", "r1").out == (
        "first: failed; dies, step 17; 0 applied, 17 discarded steps; 0/10 parameters moved\n"
    )


def test_a_failure_says_its_reason_in_a_line(command: RunCommand, service: FakeService) -> None:
    failure = {"kind": "config_refused", "rank": 0, "message": "nothing to optimize\nTraceback: long"}
    service.answers["GET", "/runs/r1"] = run_json(status="failed", failure=failure)

    (line,) = command("watch", "r1").out.splitlines()

    assert line.endswith("; config_refused (rank 0): nothing to optimize")


def test_progress_goes_to_standard_error_and_json_alone_to_standard_output(
    command: RunCommand, service: FakeService
) -> None:
    service.answers["GET", "/runs/r1"] = [run_json(), run_json(status="running"), run_json(**TRAINED)]

    plain = command("watch", "r1")
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)
    as_json = command("watch", "r1", "--json")

    assert "first: succeeded, step 30 of 30" in plain.err
    assert as_json.err == ""
    assert json.loads(as_json.out)["verdict"]["name"] == "trains"


def test_an_interrupted_run_is_stopped(
    command: RunCommand, service: FakeService, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    service.answers["POST", "/runs"] = run_json()
    service.answers["GET", "/runs/r1"] = run_json(status="running")
    service.answers["POST", "/runs/r1/stop"] = httpx.Response(202, json=run_json(status="running"))
    monkeypatch.setattr("time.sleep", interrupt)

    result = command("run", spec)

    assert result.code == 130
    assert "POST /runs/r1/stop" in service.paths()


def test_an_interrupted_run_that_has_ended_meanwhile_is_said_to_have(
    command: RunCommand, service: FakeService, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    service.answers["POST", "/runs"] = run_json()
    service.answers["GET", "/runs/r1"] = run_json(status="running")
    service.answers["POST", "/runs/r1/stop"] = problem(409, "run r1 has succeeded already")
    monkeypatch.setattr("time.sleep", interrupt)

    result = command("run", spec)

    assert result.code == 130
    assert result.err.endswith("\nrun r1 has succeeded already\n")


def test_an_interrupted_watch_leaves_its_run_alone(
    command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    service.answers["GET", "/runs/r1"] = run_json(status="running")
    monkeypatch.setattr("time.sleep", interrupt)

    result = command("watch", "r1")

    assert result.code == 130
    assert "POST /runs/r1/stop" not in service.paths()
    assert result.err.endswith("\nr1 goes on; `muonscope stop r1` stops it\n")


@pytest.mark.parametrize("has_muon", [True, False])
def test_a_run_without_a_muon_parameter_says_so_where_it_says_that_it_trains(
    has_muon: bool, command: RunCommand, service: FakeService
) -> None:
    trains = {"name": "trains", "evidence": "30 steps"}
    nothing = {"name": "no_muon", "evidence": "none of the 3 trainable parameters is routed to it"}
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED, findings=[trains] if has_muon else [trains, nothing])
    service.answers["GET", "/runs/r1/steps"] = {"steps": [], "next_start": None}

    watched, shown = command("watch", "r1").out, command("show", "r1").out

    assert ("no parameter is trained by Muon" in watched) is not has_muon
    assert ("no_muon: none of the 3 trainable parameters" in shown) is not has_muon
    assert "trains: 30 steps" not in shown


@pytest.mark.parametrize("verb", ["stop", "retry"])
def test_stop_and_retry_ask_for_it(verb: str, command: RunCommand, service: FakeService) -> None:
    service.answers["POST", f"/runs/r1/{verb}"] = httpx.Response(202, json=run_json(status="queued"))

    assert command(verb, "r1").code == 0
    assert service.paths() == [f"POST /runs/r1/{verb}"]


def test_a_clone_prints_the_new_runs_id_alone(command: RunCommand, service: FakeService) -> None:
    service.answers["POST", "/runs/r1/clone"] = httpx.Response(201, json=run_json("r2"))

    result = command("clone", "r1")

    assert (result.code, result.out, service.paths()) == (0, "r2\n", ["POST /runs/r1/clone"])


def test_an_error_of_a_tasks_own_code_ends_with_where_it_was_raised(command: RunCommand, service: FakeService) -> None:
    trace = (
        "AssertionError: mine\nTraceback (most recent call last):\n"
        '  File "workers/train_loop.py", line 9, in train\n    loss = task.loss()\n'
        '  File "laptop_task.py", line 23, in loss\n    assert False, "mine"\nAssertionError: mine'
    )
    failure = {"kind": "task_error", "message": trace, "rank": 0}
    service.answers["GET", "/runs/r1"] = run_json(status="failed", failure=failure)

    result = command("watch", "r1")

    assert result.code == 1
    assert "laptop_task.py" not in result.out
    assert '  File "laptop_task.py", line 23, in loss\n    assert False, "mine"' in result.err
    assert "Traceback" not in result.err


def test_an_error_that_a_library_raises_is_told_with_the_line_of_ones_own_that_led_there(
    command: RunCommand, service: FakeService
) -> None:
    places = [
        "/opt/muonscope/workers/rank.py", "/tmp/ray/working_dir/my_task.py", "/venv/lib/python3.11/site-packages/a.py",
        "/venv/lib/python3.11/site-packages/b.py", "/venv/lib/python3.11/site-packages/c.py",
    ]  # fmt: skip
    frames = "".join(f'  File "{path}", line {n}, in f\n    call_{n}()\n' for n, path in enumerate(places))
    message = f"RuntimeError: shapes\nTraceback (most recent call last):\n{frames}RuntimeError: shapes"
    failure = {"kind": "task_error", "message": message, "rank": 0}
    service.answers["GET", "/runs/r1"] = run_json(status="failed", failure=failure)

    told = [line for line in command("watch", "r1").err.splitlines() if line.startswith("  ")]

    assert told == [
        f'  File "{places[1]}", line 1, in f', "    call_1()", "  ...",
        f'  File "{places[3]}", line 3, in f', "    call_3()", f'  File "{places[4]}", line 4, in f', "    call_4()",
    ]  # fmt: skip


def test_a_checked_spec_is_not_submitted(command: RunCommand, service: FakeService, tmp_path: Path) -> None:
    service.answers["POST", "/runs/validate"] = {"spec": {}, "fingerprint": "f00"}
    path = tmp_path / "spec.yaml"
    path.write_text("steps: 3\n")

    assert command("submit", str(path), "--check").out == "would be accepted, fingerprint f00\n"
    assert service.paths() == ["POST /runs/validate"]


def test_tags_go_on_and_off_several_runs(command: RunCommand, service: FakeService) -> None:
    for run_id in ("r1", "r2"):
        service.answers["PATCH", f"/runs/{run_id}"] = run_json(id=run_id, tags=["night"])

    result = command("tag", "r1", "r2", "--add", "night", "--remove", "draft")

    assert result.out.splitlines() == ["r1 carries night", "r2 carries night"]
    assert [json.loads(request.content) for request in service.requests] == [
        {"add_tags": ["night"], "remove_tags": ["draft"]}
    ] * 2


def test_tagging_with_no_tag_is_misuse(command: RunCommand, service: FakeService) -> None:
    assert command("tag", "r1").code == 2
    assert service.requests == []


def test_stopping_what_is_over_is_an_error_with_the_services_words(command: RunCommand, service: FakeService) -> None:
    service.answers["POST", "/runs/r1/stop"] = problem(409, "The status does not allow this", detail="r1 has succeeded")

    result = command("stop", "r1")

    assert result.code == 1
    assert "r1 has succeeded" in result.err


def test_alone_a_spec_that_no_service_takes_is_refused_before_one_is_started(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("name: mine\nstepz: 3")
    (tmp_path / "good.yaml").write_text("name: mine\nsteps: 3")
    # Counter-test: a good one is not refused here, and its service would be started, had it a place for the record.
    refused, good = (
        command("run", str(tmp_path / name), "--standalone", "--record", "/proc/none/mine.db")
        for name in ("bad.yaml", "good.yaml")
    )

    assert refused.code == 1
    assert refused.err.splitlines()[:3] == ["muonscope: stepz: unknown field", "  field:  stepz", "  value:  3"]
    assert "steps" in refused.err.splitlines()[3]
    assert "waiting for Ray" in good.err
    assert "muonscope import" not in good.err


def test_an_address_without_its_scheme_is_answered_with_the_whole_one(command: RunCommand) -> None:
    assert "remedy: write http://127.0.0.1:8800\n" in command("ls", "--url", "127.0.0.1:8800").err
    # Counter-test: with another scheme before it that would be none.
    assert "remedy: write an address such as http://" in command("ls", "--url", "ftp://127.0.0.1").err


def test_a_refusal_of_what_has_no_value_shows_none(command: RunCommand, service: FakeService) -> None:
    members = {"field": "Authorization", "value": None, "remedy": "use a token of the scope submit"}
    service.answers["POST", "/runs/r1/stop"] = problem(403, "the token ann has the scope read", **members)

    refused = command("stop", "r1")

    assert "  field:  Authorization\n  remedy: use a token" in refused.err


def test_a_failure_is_told_once(command: RunCommand, service: FakeService) -> None:
    failed = run_json(status="failed", failure={"kind": "worker_died", "message": "the process is gone"})
    service.answers["GET", "/runs/r1"] = failed

    result = command("watch", "r1")

    assert result.err.endswith("first: failed: worker_died\n")
    assert result.out.count("the process is gone") == 1


def test_an_interrupted_run_is_said_to_be_stopped_once_it_is(
    command: RunCommand, service: FakeService, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_once(_: object) -> None:
        monkeypatch.setattr("time.sleep", lambda _: None)
        raise KeyboardInterrupt

    service.answers["POST", "/runs"] = run_json()
    running = run_json(status="running")
    service.answers["GET", "/runs/r1"] = [running, running, run_json(status="stopped")]
    service.answers["POST", "/runs/r1/stop"] = httpx.Response(202, json=running)
    monkeypatch.setattr("time.sleep", interrupt_once)

    result = command("run", spec)

    assert result.code == 130
    assert result.err.endswith("\nstopping r1\nr1 is stopped\n")
