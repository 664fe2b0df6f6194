"""`muonscope bisect` against a service whose releases change where the test says."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from muonscope.contract.releases import SUPPORTED_DEEPSPEED
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import DIED, TRAINED, FakeService, problem, run_json

STOPPED: dict[str, Any] = {"status": "stopped", "verdict": None}


def failed(kind: str, message: str) -> dict[str, Any]:
    return {"status": "failed", "failure": {"kind": kind, "message": message}}


def answers(service: FakeService, end_under: Callable[[str], Mapping[str, Any] | httpx.Response]) -> list[str]:
    """Let the service run the experiment under any release; returns what is asked for, as it comes in."""
    asked: list[str] = []

    def create(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        version = body["deepspeed"]
        asked.append(version)
        end = end_under(version)
        if isinstance(end, httpx.Response):
            return end
        run = run_json(f"r-{version}", name="thirty-step zero_stage=1", **end)
        run["spec"] = {**run["spec"], "deepspeed": {"version": version}}
        experiment = {
            "id": f"e-{version}",
            "name": body["builtin"],
            "builtin": body["builtin"],
            "runs": [run],
            "table": {
                "columns": ["stage", "outcome", "overflows", "largest weight motion"],
                "rows": [[1, _outcome(run), run["summary"]["overflows"], run["summary"].get("max_weight_motion")]],
                "run_ids": [run["id"]],
                "published": [None],
            },
        }
        service.answers["GET", f"/experiments/e-{version}"] = experiment
        return httpx.Response(201, json=experiment)

    service.answers["POST", "/experiments"] = create
    return asked


def _outcome(run: dict[str, Any]) -> str:
    verdict = run["verdict"]
    return str(run["status"]) if verdict is None else str(verdict["name"])


def dies_before(first: str) -> Callable[[str], dict[str, Any]]:
    return lambda version: DIED if SUPPORTED_DEEPSPEED.index(version) < SUPPORTED_DEEPSPEED.index(first) else TRAINED


def test_the_release_in_which_the_verdict_changed_is_named(command: RunCommand, service: FakeService) -> None:
    asked = answers(service, dies_before("0.19.7"))

    result = command("bisect", "--experiment", "thirty-step", "--releases", "0.17.6..0.19.8", "--by", "verdict")

    assert result.code == 0
    title, header, row = result.out.splitlines()[:3]
    assert title == "changed in 0.19.7"
    assert header.split() == ["run", "column", "0.19.6", "0.19.7"]
    assert row.split() == ["thirty-step", "zero_stage=1", "verdict", "dies", "trains"]
    assert len(asked) == len(set(asked)) < 8
    assert "0.17.6 to 0.19.6: alike in all tried (0.17.6," in result.out


def test_a_row_changes_in_every_cell_that_differs(command: RunCommand, service: FakeService) -> None:
    answers(service, dies_before("0.19.8"))

    result = command("bisect", "-e", "thirty-step", "-r", "0.19.7..0.19.8", "--json")

    document = json.loads(result.out)
    (change,) = document["changes"]
    assert result.code == 0
    assert (change["last_before"], change["first_after"]) == ("0.19.7", "0.19.8")
    assert {cell["column"]: (cell["before"], cell["after"]) for cell in change["cells"]} == {
        "outcome": ("dies", "trains"),
        "overflows": (17, 2),
        "largest weight motion": (0.0, 0.43),
    }
    assert [trial["experiment_id"] for trial in document["tried"]] == ["e-0.19.7", "e-0.19.8"]


def test_no_change_ends_with_three_after_both_ends(command: RunCommand, service: FakeService) -> None:
    asked = answers(service, lambda _: TRAINED)

    result = command("bisect", "--experiment", "thirty-step")

    assert (result.code, asked) == (3, ["0.17.6", "0.19.8"])
    assert "no change: 0.17.6 and 0.19.8 answer alike" in result.out


def test_a_release_that_has_none_of_the_runs_is_an_answer(command: RunCommand, service: FakeService) -> None:
    answers(
        service,
        lambda version: problem(422, "no such stage", field="deepspeed") if version < "0.18.9" else TRAINED,
    )

    result = command("bisect", "-e", "gradient-accumulation")

    assert "changed in 0.18.9" in result.out
    assert "not offered  trains" in result.out


def test_a_release_that_raises_is_an_answer_too(command: RunCommand, service: FakeService) -> None:
    error = failed("task_error", "RuntimeError: a split view is modified in place\nTraceback")
    answers(service, lambda version: error if version == "0.18.9" else TRAINED)

    result = command("bisect", "-e", "thirty-step", "-r", "0.18.9..0.19.2", "--by", "verdict")

    assert result.code == 0
    assert "fails: RuntimeError: a split view is modified in place" in result.out
    assert "Traceback" not in result.out


def test_a_release_that_raises_without_a_word_is_an_answer_too(command: RunCommand, service: FakeService) -> None:
    answers(service, lambda version: failed("task_error", "") if version == "0.18.9" else TRAINED)

    result = command("bisect", "-e", "thirty-step", "-r", "0.18.9..0.19.2", "--by", "verdict")

    assert (result.code, "changed in 0.19.0" in result.out) == (0, True), result.err


def test_an_errors_long_sentence_is_cut_in_the_table_and_whole_as_json(
    command: RunCommand, service: FakeService
) -> None:
    sentence = (
        "RuntimeError: Output 0 of Split is a view and is being modified inplace. " + "It goes on. " * 8 + "The end."
    )
    answers(service, lambda version: failed("task_error", sentence) if version == "0.18.9" else TRAINED)
    words = ("bisect", "-e", "thirty-step", "-r", "0.18.9..0.19.2", "--by", "verdict")

    table, document = command(*words).out, json.loads(command(*words, "--json").out)

    assert "fails: RuntimeError: Output 0 of Split is a view and is being modified …" in table
    assert max(len(line) for line in table.splitlines()) < 200
    (cell,) = document["changes"][0]["cells"]
    assert cell["before"] == f"fails: {sentence}"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (failed("worker_died", "rank 1 is gone"), 1, "failed for a reason that says nothing of the release"),
        (failed("setup_failed", "pip ended with 1"), 1, "pip ended with 1"),
        (STOPPED, 130, "stopped"),
    ],
)
def test_a_machine_that_failed_ends_the_search_without_an_answer(
    command: RunCommand, service: FakeService, end: dict[str, Any], code: int, said: str
) -> None:
    asked = answers(service, lambda _: end)

    result = command("bisect", "-e", "thirty-step")

    assert (result.code, len(asked)) == (code, 1)
    assert said in result.err
    assert "changed" not in result.out


@pytest.mark.parametrize("releases", ["0.16.0..0.19.8", "0.19.8..0.17.6", "0.19.8", "0.19.8..0.19.8"])
def test_a_range_that_is_none_is_refused_before_anything_runs(
    command: RunCommand, service: FakeService, releases: str
) -> None:
    result = command("bisect", "-e", "thirty-step", "-r", releases)

    assert result.code == 2
    assert service.requests == []


def test_an_experiment_that_does_not_exist_is_said_once(command: RunCommand, service: FakeService) -> None:
    asked = answers(service, lambda _: problem(422, "no built-in experiment", field="builtin", value="x"))

    result = command("bisect", "-e", "x")

    assert (result.code, len(asked)) == (1, 1)
    assert "no built-in experiment" in result.err


def test_a_bisect_that_was_interrupted_goes_on_from_the_record(command: RunCommand, service: FakeService) -> None:
    interrupted = answers(service, lambda version: STOPPED if version == "0.19.8" else DIED)
    assert command("bisect", "-e", "thirty-step", "-r", "0.19.7..0.19.8").code == 130
    held = [service.answers["GET", f"/experiments/e-{version}"] for version in interrupted]
    service.answers["GET", "/experiments"] = {"experiments": held, "next_cursor": None}
    asked = answers(service, lambda _: TRAINED)

    result = command("bisect", "-e", "thirty-step", "-r", "0.19.7..0.19.8", "--resume")

    assert asked == ["0.19.8"], "a stopped run is no answer, and a finished one is not asked for again"
    assert (result.code, result.out.splitlines()[0]) == (0, "changed in 0.19.8")
    assert "DeepSpeed 0.19.7: on record, experiment e-0.19.7" in result.err
