"""What `ls`, `show`, `logs` and `export` print of runs."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import DIED, TRAINED, FakeService, run_json


def step_json(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "overflow": False, "discarded": False, "loss": 2.5} | changes


def attempt_with_ranks(labels: list[str]) -> dict[str, Any]:
    ranks = [
        {"rank": 0, "node": "10.0.0.1", "pid": 70, "device": "NVIDIA H200", "device_id": "3", "local_rank": 0},
        {"rank": 1, "node": "10.0.0.2", "pid": 71, "device": "cpu", "device_id": None, "local_rank": 0},
    ]
    return {"id": "run-r1-a1", "number": 1, "status": "running", "ranks": ranks, "environment": {"labels": labels}}


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


@pytest.mark.parametrize(
    ("first", "then", "printed"),
    [
        pytest.param("one\n", "one\ntwo\n", "one\ntwo\n", id="once and to the end"),
        pytest.param("a worker died\n", "again\n", "a worker died\nagain\n", id="with the next attempt's"),
    ],
)
def test_a_followed_log_is_printed_as_it_comes(
    first: str, then: str, printed: str, command: RunCommand, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    service.answers["GET", "/runs/r1"] = [run_json(status="running"), run_json(**TRAINED)]
    service.answers["GET", "/runs/r1/logs"] = [httpx.Response(200, text=text) for text in (first, then)]

    assert command("logs", "r1", "--follow").out == printed


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
