"""Models and set-ups that surprised people, through the API and the command: what each is told of its run.

One service and one Ray; the runs are submitted together and train two at a time. Everything is real.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.installation import ENDED, Installation
from tests.integration.service.shell import Shell

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

NAMED = "tests.faults.tasks:named"
SHAPES = {"w": [8, 8], "scale": [6, 1, 1], "stack": [3, 4, 4]}
DEEPSPEEDS = {"implementation": "deepspeed", "step_ordering": "deferred"}
BY_NAME = {"tok_embed": [10, 8], "lm_head": [10, 8], "wte": [10, 8], "head": [10, 8]}


def named(shapes: dict[str, list[int]], **spec: Any) -> dict[str, Any]:
    options = {"name": NAMED, "options": {"shapes": shapes}}
    return {"task": options, "world_size": 1, "steps": 4, "precision": "fp32", "optimizer": {"lr": 0.02}, **spec}


SPECS: dict[str, dict[str, Any]] = {
    "a08": named({"bias": [8], "scale": [4]}),
    "a11": named(SHAPES, **DEEPSPEEDS),
    "a11 ours": named(SHAPES),
    "a16": named(BY_NAME, **DEEPSPEEDS),
    "b05": {"world_size": 1, "steps": 4, "precision": "bf16", "faults": [{"kind": "nan", "step": 1}]},
    "c09": {"world_size": 2, "steps": 4, "precision": "fp16"},
}


@dataclass(frozen=True)
class Told:
    """What one run's readers see."""

    run: dict[str, Any]
    steps: list[dict[str, Any]]
    parameters: dict[str, dict[str, Any]]
    code: int
    """The exit code of `muonscope watch`."""
    watched: str
    shown: list[list[str]]
    """The words of each line of `muonscope show --parameters --ranks`."""

    def fact(self, name: str) -> str:
        return next((" ".join(words[1:]) for words in self.shown if words and words[0] == name), "")

    @property
    def routes(self) -> dict[str, str]:
        """By parameter, as the command lists them; the API must agree."""
        listed = {words[0]: words[2] for words in self.shown if words and words[0] in self.parameters}
        assert listed == {name: each["route"] for name, each in self.parameters.items()}
        return listed


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("home"), settings={"allow_tasks": NAMED}) as one:
        yield one


@pytest.fixture(scope="module")
def told(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    shell = Shell(tmp_path_factory.mktemp("shell"), {"MUONSCOPE_URL": installation.url})
    ids = {name: installation.submit(name=name, **spec) for name, spec in SPECS.items()}
    return {name: _told(installation, shell, run_id) for name, run_id in ids.items()}


def _told(installation: Installation, shell: Shell, run_id: str) -> Told:
    run = installation.wait_for(run_id, *ENDED)
    code, watched = shell.run("watch", run_id)
    ended, shown = shell.run("show", run_id, "--parameters", "--ranks")
    assert ended == 0, shown
    get = installation.client.get
    parameters = get(f"/runs/{run_id}/parameters").json()["parameters"]
    return Told(
        run, get(f"/runs/{run_id}/steps").json()["steps"], {each["name"]: each for each in parameters}, code, watched,
        [line.split() for line in shown.splitlines()],
    )  # fmt: skip


def test_a08_a_muon_that_takes_nothing_says_so_where_it_says_that_it_trains(told: dict[str, Told]) -> None:
    case = told["a08"]

    assert (case.code, case.run["summary"]["muon_parameters_total"]) == (0, 0), case.watched
    assert "no parameter is trained by Muon" in case.watched
    assert case.fact("finding").startswith("no_muon:")
    assert set(case.routes.values()) == {"adamw"}
    assert [step["momentum_norm"] for step in case.steps] == [None] * 4


def test_a11_parameters_of_more_dimensions_are_listed_with_their_route_and_stay_finite(told: dict[str, Told]) -> None:
    case = told["a11"]

    assert (case.code, case.routes) == (0, dict.fromkeys(("w", "scale", "stack"), "muon")), case.watched
    assert ["stack", "3×4×4", "muon"] in [words[:3] for words in case.shown]
    assert all(isinstance(step["momentum_norm"], float) for step in case.steps)
    assert case.fact("moved").startswith("3/3")
    # Ours takes no vector for a matrix because it has dimensions of one.
    assert told["a11 ours"].routes == {"w": "muon", "scale": "adamw", "stack": "muon"}


def test_a16_deepspeeds_own_muon_is_shown_to_go_by_names_alone(told: dict[str, Told]) -> None:
    case = told["a16"]

    assert case.routes == {"tok_embed": "adamw", "lm_head": "adamw", "wte": "muon", "head": "muon"}, case.watched
    assert all(each["reason"] for each in case.parameters.values())


def test_b05_a_step_that_bf16_discards_is_an_overflow_at_a_scale_of_1(told: dict[str, Told]) -> None:
    case = told["b05"]

    assert [(step["overflow"], step["discarded"]) for step in case.steps] == [
        (False, False), (True, True), (False, False), (False, False),
    ]  # fmt: skip
    assert {step["loss_scale_before"] for step in case.steps} == {1.0}
    assert (case.run["summary"]["discarded"], case.code) == (1, 0), case.watched
    # A precision without a loss scale is shown with none.
    assert ["1", "overflow", "discarded"] in [words[:3] for words in case.shown]
    assert not any("→" in words for words in case.shown if words[:1] == ["1"])
    assert "3 applied, 1 discarded step;" in case.watched


def test_c09_each_rank_is_shown_on_one_device_of_its_own_with_local_rank_0(told: dict[str, Told]) -> None:
    case = told["c09"]
    ranks = case.run["attempts"][-1]["ranks"]

    assert [(rank["rank"], rank["local_rank"]) for rank in ranks] == [(0, 0), (1, 0)]
    assert len({rank["pid"] for rank in ranks}) == 2
    # Without a GPU there is no physical one to name.
    assert {rank["device_id"] for rank in ranks} == {None}
    listed = [words for words in case.shown if words and words[-1] in {str(rank["pid"]) for rank in ranks}]
    assert [(words[0], words[-2]) for words in listed] == [("0", "0"), ("1", "0")]


def test_e20_fp16_on_a_processor_is_labelled_wherever_the_run_is_shown(told: dict[str, Told]) -> None:
    environment = told["c09"].run["attempts"][-1]["environment"]

    assert environment["labels"] == ["fp16 emulated on CPU"]
    assert told["c09"].fact("labels") == "fp16 emulated on CPU"
    assert told["b05"].fact("labels") == ""


def test_every_answer_is_json_where_it_is_asked_for(
    installation: Installation, told: dict[str, Told], tmp_path: Path
) -> None:
    shell = Shell(tmp_path, {"MUONSCOPE_URL": installation.url})
    case = told["a16"]

    code, printed = shell.run("show", case.run["id"], "--parameters", "--json")

    document = json.loads(printed)
    assert (code, document["verdict"]["name"]) == (0, case.run["verdict"]["name"])
    assert [(each["name"], each["route"]) for each in document["parameters"]] == list(case.routes.items())
