"""Progress: redrawn for a person, one line a change in a pipe, nothing under --json."""

import io
from typing import Any

import pytest
from rich.console import Console

from muonscope.cli.progress import _Bars, _Lines, follow_runs
from muonscope.cli.screen import Screen
from muonscope.client import Run
from tests.unit.client.fake_service import DIED, run_json


def running(steps: int, **changes: Any) -> Run:
    return Run.model_validate(
        run_json(status="running", summary={"steps": steps, "final_loss_scale": 32768.0}, **changes)
    )


def test_a_pipe_gets_one_line_a_tenth_and_not_one_a_poll(capsys: pytest.CaptureFixture[str]) -> None:
    with follow_runs([running(0)], Screen()) as progress:
        for steps in range(31):
            progress.update([running(steps)])
            progress.update([running(steps)])

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1].endswith("first: running, step 30 of 30, loss scale 32768")


def test_a_pipe_hears_of_a_long_run_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    progress = _Lines(Screen(), lambda: now[0])
    for second in range(61):
        now[0] = float(second)
        progress.update([running(second, spec={"steps": 100_000, "task": {}})])

    lines = capsys.readouterr().err.splitlines()
    said = [line.split("first: ")[1].split(" of")[0] for line in lines]
    assert said == ["running", *(f"running, step {step}" for step in (15, 30, 45, 60))]
    progress.update([running(60, spec={"steps": 100_000, "task": {}})])
    now[0] = 200.0
    progress.update([running(60, spec={"steps": 100_000, "task": {}})])
    assert capsys.readouterr().err == "", "nothing has happened"


def test_a_run_that_is_tried_again_does_not_show_its_last_attempts_step(capsys: pytest.CaptureFixture[str]) -> None:
    again = Run.model_validate(run_json(status="pending", summary={"steps": 17, "final_loss_scale": 1.0}))

    with follow_runs([again], Screen()) as progress:
        progress.update([again])

    assert capsys.readouterr().err.endswith("first: pending\n")


def test_a_pipe_is_told_why_a_run_waits(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = Run.model_validate(run_json(waiting_reason="2 GPUs are busy", queue_position=3))

    with follow_runs([waiting], Screen()) as progress:
        progress.update([waiting])

    assert "first: queued, position 3 (2 GPUs are busy)" in capsys.readouterr().err


def test_a_run_that_failed_before_it_proved_anything_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    failure = {"kind": "task_error", "message": "ValueError: no parameter is called x\nTraceback", "rank": 1}
    failed = Run.model_validate(run_json(status="failed", failure=failure, verdict={"name": "inconclusive"}))

    with follow_runs([failed], Screen()) as progress:
        progress.update([failed])

    line = capsys.readouterr().err
    assert line.endswith("first: failed: task_error (rank 1): ValueError: no parameter is called x\n")


def test_json_has_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with follow_runs([running(0)], Screen(as_json=True)) as progress:
        progress.update([running(30)])

    assert capsys.readouterr().err == ""


def test_bars_show_each_run_and_the_count_of_finished_ones() -> None:
    dead = Run.model_validate(run_json("r2", name="doomed \x1b[2J", **DIED))
    console = Console(file=io.StringIO(), width=120, force_terminal=False)

    console.print(_Bars([running(15), dead]))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "15/30" in text
    assert "dies, step 17" in text
    assert "1/2 runs" in text
    assert "\x1b" not in text


def test_a_run_that_waits_no_more_is_not_told_twice(capsys: pytest.CaptureFixture[str]) -> None:
    def pending(reason: str | None) -> Run:
        return Run.model_validate(run_json(status="pending", waiting_reason=reason))

    with follow_runs([pending(None)], Screen()) as progress:
        for reason in (None, "its job starts", None, "1 of 2 GPUs is free"):
            progress.update([pending(reason)])

    said = [line.split("first: ")[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["pending", "pending (its job starts)", "pending (1 of 2 GPUs is free)"]


@pytest.mark.parametrize(("precision", "scale"), [("fp32", ""), ("fp16", ", loss scale 1")])
def test_a_precision_without_a_loss_scale_shows_none(
    precision: str, scale: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"steps": 30, "task": {}, "precision": precision}
    run = Run.model_validate(run_json(status="running", spec=spec, summary={"steps": 3, "final_loss_scale": 1.0}))

    with follow_runs([run], Screen()) as progress:
        progress.update([run])

    assert capsys.readouterr().err.endswith(f"first: running, step 3 of 30{scale}\n")
