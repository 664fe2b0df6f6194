"""An experiment's table as people read it, and the one that the README shows."""

import json
import re
from pathlib import Path
from typing import Any

from muonscope.cli.experiment_views import result_table
from muonscope.cli.screen import plain_table
from muonscope.client import Experiment
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import RunStatus, Verdict
from service.analysis.builtin_experiments import build
from service.analysis.experiment_table import build_table
from service.analysis.figures import RunResult

README = Path(__file__).parents[3] / "README.md"
DIED: dict[str, Any] = {
    "status": RunStatus.FAILED, "verdict": Verdict.DIES, "verdict_step": 17, "steps": 17, "overflows": 17,
    "final_loss_scale": 1.0, "parameters_moved": 0, "momentum_finite": False, "max_weight_motion": 0.0,
}  # fmt: skip


def measured(place: int, spec: dict[str, Any]) -> RunResult:
    """What the CPU measured of a run: DeepSpeed 0.19.8, torch 2.13."""
    scaled = RunSpec.model_validate(spec).loss_scale.initial_power == 16
    trained: dict[str, Any] = {
        "status": RunStatus.SUCCEEDED, "verdict": Verdict.TRAINS, "verdict_step": None, "steps": 30,
        "overflows": 2 if scaled else 0, "final_loss_scale": 32768.0 if scaled else 1.0, "parameters_moved": 10,
        "momentum_finite": True, "max_weight_motion": 8.042 if scaled else 8.629,
    }  # fmt: skip
    ends = DIED if scaled and spec["step_ordering"] == "master" else trained
    return RunResult(run_id=f"r{place}", spec=spec, parameters_total=10, **ends)


def thirty_step(*, moved: int = 10) -> Experiment:
    specs = [RunSpec.model_validate(cell.spec).model_dump(mode="json") for cell in build("thirty-step", {}).cells]
    results = [measured(place, spec) for place, spec in enumerate(specs)]
    if moved != 10:
        results[1] = RunResult(**{**vars_of(results[1]), "parameters_moved": moved})
    table = json.loads(json.dumps(build_table(results, builtin="thirty-step").as_json()))
    return Experiment.model_validate({"id": "e1", "name": "thirty-step", "builtin": "thirty-step", "table": table})


def vars_of(result: RunResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in RunResult.__slots__}


def test_the_readme_shows_the_table_that_is_printed() -> None:
    blocks = re.findall(r"^```\n(stage .*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)

    assert blocks == ["\n".join(plain_table(*result_table(thirty_step()))) + "\n"]


def test_a_figure_that_another_column_shows_is_left_to_json() -> None:
    experiment = thirty_step()

    assert {"measured", "published figure"} <= set(experiment.table.columns)
    assert not {"measured", "published figure"} & set(result_table(experiment)[0])


def test_what_is_not_as_published_is_still_said_in_full() -> None:
    columns, rows = result_table(thirty_step(moved=9))

    assert columns[-1] == "published"
    assert [row[-1] for row in rows] == ["pass", "fail: parameters moved is 9, published 10", *["pass"] * 6]


def test_other_experiments_show_their_figures() -> None:
    experiment = thirty_step().model_copy(update={"builtin": "calm-boom"})

    assert {"measured", "published figure"} <= set(result_table(experiment)[0])
