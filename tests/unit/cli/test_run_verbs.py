"""Each verb about runs: what it asks, what it prints, how it ends."""

import json
import re
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


def step_json(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "overflow": False, "discarded": False, "loss": 2.5} | changes


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


def test_ls_is_a_plain_table_when_piped(command: RunCommand, service: FakeService) -> None:
    runs = [run_json("r1", **TRAINED), run_json("r2", name="x" * 150, **DIED)]
    service.answers["GET", "/runs"] = {"runs": runs, "next_cursor": None}

    header, first, second = command("ls").out.splitlines()

    assert header.split() == [
        "run",
        "name",
        "status",
        "verdict",
        "steps",
        "overflows",
        "discarded",
        "scale",
        "moved",
        "age",
    ]
    assert first.split()[:6] == ["r1", "first", "succeeded", "trains", "30/30", "2"]
    assert "dies, step 17" in second
    assert "x" * 150 in second


def test_ls_reads_no_more_pages_than_it_shows(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs"] = {"runs": [run_json(f"r{n}") for n in range(5)], "next_cursor": "more"}

    result = command("ls", "-n", "3", "--json")

    assert [run["id"] for run in json.loads(result.out)] == ["r0", "r1", "r2"]
    assert len(service.requests) == 1


def test_ls_without_runs_says_how_to_get_one(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs"] = {"runs": [], "next_cursor": None}

    result = command("ls")

    assert (result.code, result.out) == (0, "")
    assert "muonscope submit" in result.err


def test_a_name_cannot_steer_the_terminal(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs"] = {"runs": [run_json(name="a\x1b[2Jb\r[red]c")], "next_cursor": None}

    out = command("ls").out

    assert "\x1b" not in out
    assert "a\\x1b[2Jb\\r[red]c" in out


def test_show_has_the_evidence_the_phases_and_the_last_steps(command: RunCommand, service: FakeService) -> None:
    attempt = {
        "id": "run-r1-a1",
        "number": 1,
        "status": "failed",
        "phases": {"first_step": 14.0, "submitted": 10.0, "driver_started": 11.5},
        "stored_steps": 17,
        "declared_steps": 17,
    }
    service.answers["GET", "/runs/r1"] = run_json(attempts=[attempt], **DIED)
    steps = [step_json(16, overflow=True, discarded=True, momentum_norm="NaN", loss_scale_before=1.0)]
    service.answers["GET", "/runs/r1/steps"] = {"steps": steps, "next_start": None}

    out = command("show", "r1").out

    assert "dies, step 17" in out
    assert "overflow at loss scale 1" in out
    assert "attempt 1: driver_started 1.5 s, first_step 2.5 s" in out
    header, row = (line for line in out.splitlines() if line.startswith(("attempt  ", "1  ")))
    assert row[header.index("first step after") :].startswith("4.0 s")
    assert max(len(line) for line in out.splitlines()) < 100
    assert "nan" in out.splitlines()[-1]
    assert service.requests[-1].url.params["start"] == "12"


def attempt_with_ranks(labels: list[str]) -> dict[str, Any]:
    ranks = [
        {"rank": 0, "node": "10.0.0.1", "pid": 70, "device": "NVIDIA H200", "device_id": "3", "local_rank": 0},
        {"rank": 1, "node": "10.0.0.2", "pid": 71, "device": "cpu", "device_id": None, "local_rank": 0},
    ]
    return {"id": "run-r1-a1", "number": 1, "status": "running", "ranks": ranks, "environment": {"labels": labels}}


@pytest.mark.parametrize(("precision", "scale"), [("fp16", "32768"), ("bf16", "–")])
def test_ls_shows_no_loss_scale_of_a_precision_that_has_none(
    precision: str, scale: str, command: RunCommand, service: FakeService
) -> None:
    run = run_json(spec={"precision": precision, "steps": 30}, summary={"steps": 30, "final_loss_scale": 32768.0})
    service.answers["GET", "/runs"] = {"runs": [run], "next_cursor": None}

    header, row = (line.split("  ") for line in command("ls").out.splitlines())
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (header, row)]
    assert dict(zip(*cells, strict=True))["scale"] == scale


@pytest.mark.parametrize("labels", [["fp16 emulated on CPU"], []])
def test_show_says_what_a_run_emulates(labels: list[str], command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(attempts=[attempt_with_ranks(labels)])

    lines = [line.split(maxsplit=1) for line in command("show", "r1", "--steps", "0").out.splitlines()]

    assert (["labels", "fp16 emulated on CPU"] in lines) is bool(labels)


def test_show_lists_ranks_and_parameters_where_they_are_asked_for(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(attempts=[attempt_with_ranks([])])
    parameters = [
        {"index": 0, "name": "wte.weight", "shape": [10, 8], "route": "muon", "reason": "2-D weight"},
        {"index": 1, "name": "scale", "shape": [], "route": "frozen", "reason": "requires no gradient"},
    ]
    service.answers["GET", "/runs/r1/parameters"] = {"parameters": parameters}

    plain = command("show", "r1", "--steps", "0").out
    asked = command("show", "r1", "--steps", "0", "--ranks", "--parameters").out.splitlines()
    as_json = json.loads(command("show", "r1", "--parameters", "--json").out)

    assert "wte.weight" not in plain
    assert "NVIDIA" not in plain
    first = next(place for place, line in enumerate(asked) if line.startswith("rank"))
    rank, other = (line.split() for line in asked[first + 1 : first + 3])
    assert rank == ["0", "10.0.0.1", "NVIDIA", "H200", "3", "0", "70"]
    assert other == ["1", "10.0.0.2", "cpu", "–", "0", "71"]
    assert [line.split(maxsplit=3) for line in asked[-2:]] == [
        ["wte.weight", "10×8", "muon", "2-D weight"],
        ["scale", "scalar", "frozen", "requires no gradient"],
    ]
    assert (as_json["id"], as_json["parameters"]) == ("r1", parameters)
    assert "parameters" not in json.loads(command("show", "r1", "--json").out)


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


@pytest.mark.parametrize("ray_job", ["run-r1-a1", None])
def test_a_recorded_script_is_shown_without_a_ray_job(
    ray_job: str | None, command: RunCommand, service: FakeService
) -> None:
    attempt = {"id": "run-r1-a1", "ray_job": ray_job, "number": 1, "status": "running"}
    service.answers["GET", "/runs/r1"] = run_json(attempts=[attempt])
    service.answers["GET", "/runs/r1/steps"] = {"steps": [], "next_start": None}

    assert command("show", "r1").out.splitlines()[-1].split()[-1] == (ray_job or "–")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"precision": "fp32"}, "none (fp32)"),
        ({"precision": "bf16", "loss_scale": {"initial_power": 8}}, "none (bf16)"),
        ({"precision": "fp16", "loss_scale": {"initial_power": 8}}, "256 → 1"),
        ({"precision": "fp16", "loss_scale": {"static": 64.0}}, "64 → 1"),
    ],
)
def test_show_gives_a_loss_scale_to_a_precision_that_has_one(
    changes: dict[str, Any], shown: str, command: RunCommand, service: FakeService
) -> None:
    run = run_json(**TRAINED)
    summary = run["summary"] | {"final_loss_scale": 1.0}
    service.answers["GET", "/runs/r1"] = run | {"spec": run["spec"] | changes, "summary": summary}
    service.answers["GET", "/runs/r1/steps"] = {"steps": [], "next_start": None}

    assert f"loss scale   {shown}\n" in command("show", "r1").out


@pytest.mark.parametrize(
    ("optimizer", "shown"),
    [
        ("AdamW", ["optimizer    AdamW on deepspeed, in a recorded script, train.py"]),
        (
            "MuonWithAuxAdam",
            ["ordering     ordered on deepspeed", "optimizer    MuonWithAuxAdam, in a recorded script, train.py"],
        ),
    ],
)
def test_show_names_a_recorded_optimizer_and_an_ordering_only_of_a_muon(
    optimizer: str, shown: list[str], command: RunCommand, service: FakeService
) -> None:
    run = run_json(**TRAINED)
    task = {"name": "external", "optimizer": optimizer, "script": "train.py"}
    spec = run["spec"] | {"task": task, "implementation": "deepspeed", "gradient_clipping": 1.0}
    service.answers["GET", "/runs/r1"] = run | {"spec": spec}
    service.answers["GET", "/runs/r1/steps"] = {"steps": [], "next_start": None}

    lines = command("show", "r1").out.splitlines()

    assert [line for line in lines if line.startswith(("ordering", "optimizer"))] == shown
    scope = "gradient" if optimizer == "AdamW" else "update"
    assert f"clipping     1, of the {scope}" in lines


def test_logs_are_printed_as_they_are(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs/r1/logs"] = httpx.Response(200, text="one\ntwo\n")

    assert command("logs", "r1").out == "one\ntwo\n"


def test_followed_logs_are_printed_once_and_to_the_end(
    command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    service.answers["GET", "/runs/r1"] = [run_json(status="running"), run_json(**TRAINED)]
    service.answers["GET", "/runs/r1/logs"] = [
        httpx.Response(200, text="one\n"),
        httpx.Response(200, text="one\ntwo\n"),
    ]

    assert command("logs", "r1", "--follow").out == "one\ntwo\n"


def test_a_followed_log_goes_on_with_the_next_attempts(
    command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    service.answers["GET", "/runs/r1"] = [run_json(status="running"), run_json(**TRAINED)]
    service.answers["GET", "/runs/r1/logs"] = [
        httpx.Response(200, text="a worker died\n"),
        httpx.Response(200, text="again\n"),
    ]

    assert command("logs", "r1", "--follow").out == "a worker died\nagain\n"


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


def test_a_log_without_a_word_says_where_to_look(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs/r1/logs"] = httpx.Response(200, text="")

    result = command("logs", "r1")

    assert (result.code, result.out) == (0, "")
    assert "`muonscope show r1`" in result.err


@pytest.mark.parametrize(("task", "shown"), [({"is_open_ended": True}, "60"), ({}, "60/100000000")])
def test_a_recording_without_an_end_has_the_steps_that_came(
    task: dict[str, Any], shown: str, command: RunCommand, service: FakeService
) -> None:
    run = run_json(summary={"steps": 60}, spec={"steps": 100_000_000, "task": {"name": "external", **task}})
    service.answers["GET", "/runs"] = {"runs": [run], "next_cursor": None}
    service.answers["GET", "/runs/r1"] = run

    assert f"  {shown}  " in command("ls").out
    assert ("100000000" in command("show", "r1", "--steps", "0").out) is not bool(task)


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


def test_an_exported_csv_is_the_services_own(command: RunCommand, service: FakeService) -> None:
    text = "step,loss\r\n0,nan\r\n1,\r\n"
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)
    service.answers["GET", "/runs/r1/steps"] = httpx.Response(200, text=text, headers={"Content-Type": "text/csv"})

    assert command("export", "r1").out.splitlines() == text.splitlines()


def test_exported_lines_keep_nan_infinity_and_not_measured_apart(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)
    steps = [step_json(0, loss="NaN", momentum_norm="-Infinity", grad_norm=None)]
    service.answers["GET", "/runs/r1/steps"] = {"steps": steps, "next_start": None}

    step = json.loads(command("export", "r1", "--format", "jsonl").out)

    assert (step["loss"], step["momentum_norm"], step["grad_norm"]) == ("NaN", "-Infinity", None)


def test_an_export_goes_to_a_file_and_says_how_much(command: RunCommand, service: FakeService, tmp_path: Path) -> None:
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)
    service.answers["GET", "/runs/r1/steps"] = {"steps": [step_json(0), step_json(1)], "next_start": None}
    path = tmp_path / "steps.jsonl"

    result = command("export", "r1", "--format", "jsonl", "-o", str(path))

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    assert result.err == f"2 steps written to {path}\n"


def test_an_unknown_export_format_is_a_misuse(command: RunCommand, service: FakeService) -> None:
    assert command("export", "r1", "--format", "xlsx").code == 2
    assert service.requests == []


def test_what_failed_is_no_verdict_and_the_verdict_is_the_records(command: RunCommand, service: FakeService) -> None:
    fault = {"kind": "worker_died", "rank": 1, "message": "the process is gone"}
    failed = run_json(status="failed", failure=fault, verdict={"name": "inconclusive", "evidence": "8 of 30 steps"})
    service.answers["GET", "/runs/r1"] = failed
    service.answers["GET", "/runs"] = {"runs": [failed], "next_cursor": None}

    shown = dict(line.split(maxsplit=1) for line in command("show", "r1", "--steps", "0").out.splitlines())
    listed = command("ls").out
    watched = command("watch", "r1").out

    assert (shown["status"], shown["verdict"]) == ("failed", "inconclusive")
    assert shown["failure"] == "worker_died (rank 1): the process is gone"
    assert re.search(r"failed: worker_died\s+inconclusive", listed)
    assert watched.startswith("first: failed; inconclusive; ")
    assert watched.endswith("; worker_died (rank 1): the process is gone\n")
    # Counter-test: a death by its numbers is a verdict, and no fault beside it.
    service.answers["GET", "/runs"] = {"runs": [run_json(**DIED)], "next_cursor": None}
    assert re.search(r"failed\s+dies, step 17", command("ls").out)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_an_export_of_a_live_run_says_what_it_wrote_and_not_what_there_was_before(
    form: str, command: RunCommand, service: FakeService, tmp_path: Path
) -> None:
    service.answers["GET", "/runs/r1"] = run_json(status="running", summary={"steps": 1})
    step = {"overflow": False, "discarded": False}
    page = {"steps": [{"step": 0, **step}, {"step": 1, **step}], "next_start": None}
    service.answers["GET", "/runs/r1/steps"] = (
        httpx.Response(200, text="step,loss\n0,1\n1,1\n") if form == "csv" else page
    )

    path = tmp_path / "steps"
    written = json.loads(command("export", "r1", "--format", form, "-o", str(path), "--json").out)["steps"]

    assert written == 2


def test_a_name_of_two_lines_is_one_row_to_whoever_reads_by_lines(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/runs"] = {"runs": [run_json(name="two\nr2  lines")], "next_cursor": None}

    heading, row = command("ls").out.splitlines()

    assert heading.startswith("run")
    assert "two\\nr2  lines" in row


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


@pytest.mark.parametrize(("precision", "is_shown"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_steps_show_a_loss_scale_where_there_is_one(
    precision: str, is_shown: bool, command: RunCommand, service: FakeService
) -> None:
    spec = {"steps": 1, "task": {}, "precision": precision}
    service.answers["GET", "/runs/r1"] = run_json(status="running", spec=spec, summary={"steps": 1, "overflows": 1})
    step = {"step": 0, "overflow": True, "discarded": True, "loss": 2.5}
    scales = {"loss_scale_before": 1.0, "loss_scale_after": 1.0}
    service.answers["GET", "/runs/r1/steps"] = {"steps": [step | scales], "next_start": None}

    shown = command("show", "r1").out

    assert ("1 → 1" in shown) is is_shown
    assert "2.5" in shown
    assert "1 overflow\n" in shown


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
