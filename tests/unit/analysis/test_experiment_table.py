from typing import Any

import pytest

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind, RunStatus, Verdict
from service.analysis.builtin_experiments import BUILTIN_NAMES, build
from service.analysis.experiment_table import Check, build_table
from service.analysis.figures import RunResult, display
from service.analysis.matrix import expand


def result(spec: dict[str, Any] | None = None, **changes: Any) -> RunResult:
    values: dict[str, Any] = {
        "run_id": "r", "spec": spec or RunSpec(world_size=2).model_dump(mode="json"), "status": RunStatus.SUCCEEDED,
        "verdict": Verdict.TRAINS, "verdict_step": None, "steps": 30, "overflows": 3, "final_loss_scale": 16384.0,
        "parameters_moved": 10, "parameters_total": 10, "momentum_finite": True, "max_weight_motion": 0.431,
    }  # fmt: skip
    return RunResult(**{**values, **changes})


DEATH = {
    "status": RunStatus.FAILED, "verdict": Verdict.DIES, "verdict_step": 17, "steps": 17, "overflows": 17,
    "final_loss_scale": 1.0, "parameters_moved": 0, "momentum_finite": False, "max_weight_motion": 0.0,
}  # fmt: skip


def check(builtin: str | None, one: RunResult) -> Check | None:
    return build_table([one], builtin=builtin).checks[0]


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_every_builtin_run_is_a_valid_spec_of_its_own(name: str) -> None:
    specs = [RunSpec.model_validate(cell.spec) for cell in build(name, {}).cells]
    assert len({spec.fingerprint() for spec in specs}) == len(specs) >= 4
    assert len({spec.name for spec in specs}) == len(specs)


def test_thirty_step_is_the_published_setting() -> None:
    cells = build("thirty-step", {}).cells
    spec = RunSpec.model_validate(cells[0].spec)

    assert len(cells) == 8
    assert (spec.world_size, spec.steps, spec.optimizer.lr, spec.gradient_clipping, spec.micro_batch_size) == (
        2, 30, 0.05, 0.0, 4,
    )  # fmt: skip
    assert (spec.step_ordering, spec.loss_scale.initial_power, spec.zero_stage) == ("master", 16, 1)


def test_published_death_and_training_pass_and_each_deviation_fails() -> None:
    master = RunSpec(world_size=2, step_ordering="master").model_dump(mode="json")
    death = result(master, **DEATH)
    trained = result()

    for each in (death, trained):
        held = check("thirty-step", each)
        assert held is not None
        assert held.passed
    deviations = [
        result(master),
        result(master, **{**DEATH, "verdict_step": 16}),
        result(master, **{**DEATH, "overflows": 16}),
        result(master, **{**DEATH, "max_weight_motion": 1e-5}),
        result(**DEATH),
        result(max_weight_motion=9.5e-5),
        result(momentum_finite=False),
        result(parameters_moved=9),
    ]
    for each in deviations:
        held = check("thirty-step", each)
        assert held is not None
        assert not held.passed
        assert held.differences


def test_nothing_is_held_against_a_run_that_has_not_ended_or_of_which_nothing_is_published() -> None:
    assert check("thirty-step", result(status=RunStatus.RUNNING)) is None
    assert check("no-such-experiment", result()) is None
    assert check(None, result()) is None


def test_a_row_says_where_a_run_stands() -> None:
    def outcome(**changes: Any) -> Any:
        return build_table([result(**changes)]).rows[0][5]

    assert outcome() == "trains"
    assert outcome(**DEATH) == "dies at step 17"
    assert outcome(status=RunStatus.QUEUED, verdict=None) == "queued"
    assert outcome(status=RunStatus.RUNNING, verdict=None, steps=12) == "running, 12 steps"
    assert outcome(status=RunStatus.STOPPED, verdict=None) == "stopped"


def test_what_was_not_measured_is_empty_and_not_zero() -> None:
    table = build_table([result(parameters_moved=None, momentum_finite=None, final_loss_scale=None,
                                max_weight_motion=float("inf"))])  # fmt: skip
    assert table.rows[0][3:] == [None, None, "trains", 3, None, float("inf")]
    assert table.as_json()["rows"][0][-1] == "Infinity"
    assert table.as_csv().splitlines()[1].endswith(",trains,3,,inf")


def test_checks_are_a_column_of_the_text_forms() -> None:
    table = build_table([result(), result(parameters_moved=9)], builtin="thirty-step")
    lines = table.as_markdown().splitlines()

    assert lines[0].endswith("| largest weight motion | measured | published figure | published |")
    assert lines[2].endswith("| trains, 10/10 moved, 3 overflows | trains, 10/10 moved | pass |")
    assert "fail: parameters moved is 9, published 10" in lines[3]
    assert "published" not in build_table([result()]).as_csv()


@pytest.mark.parametrize(
    ("cell", "text"), [(None, ""), (True, "yes"), (False, "no"), (0.43114159, "0.431142"), (65536, "65536"), ("x", "x")]
)
def test_cells_read_plainly(cell: Any, text: str) -> None:
    assert display(cell) == text


def test_a_matrix_leaves_its_base_alone_and_fills_in_what_is_missing() -> None:
    base: dict[str, Any] = {"steps": 3, "loss_scale": {"window": 5}, "deepspeed": None}
    cells = expand(base, {"loss_scale.initial_power": [1, 2], "deepspeed.version": ["0.19.8"]}, name="e")

    assert [cell.spec["loss_scale"] for cell in cells] == [
        {"window": 5, "initial_power": 1}, {"window": 5, "initial_power": 2},
    ]  # fmt: skip
    assert cells[0].spec["deepspeed"] == {"version": "0.19.8"}
    assert base == {"steps": 3, "loss_scale": {"window": 5}, "deepspeed": None}
    assert cells[0].spec["name"] == "e initial_power=1 version=0.19.8"


def test_an_empty_matrix_is_one_run() -> None:
    assert [cell.spec for cell in expand({"steps": 1}, {}, name="e")] == [{"steps": 1, "name": "e"}]


def test_what_was_never_published_is_called_expected() -> None:
    table = build_table([result()], builtin="byte-gpt")

    assert table.as_json()["check_label"] == "expected"
    assert table.as_csv().splitlines()[0].endswith("expected")
    assert build_table([result()], builtin="thirty-step").as_json()["check_label"] == "published"


def test_the_table_says_what_of_a_run_is_held_against_what_is_known() -> None:
    said = {name: build_table([result()], builtin=name).as_json()["checked"] for name in ("thirty-step", "byte-gpt")}

    assert said["byte-gpt"] == "whether it dies or trains"
    assert said["thirty-step"].endswith("of the weight motion only whether there is any")
    # Counter-test: a matrix of one's own is held against nothing.
    assert build_table([result()]).as_json()["checked"] == ""


def test_the_published_figure_stands_there_before_a_run_has_ended() -> None:
    row = build_table([result(status=RunStatus.RUNNING)], builtin="thirty-step").rows[0]

    assert row[-2:] == [None, "trains, 10/10 moved"]


def test_published_tables_shows_every_table_run_by_run() -> None:
    specs = [RunSpec.model_validate(cell.spec).model_dump(mode="json") for cell in build("published-tables", {}).cells]
    table = build_table([result(spec) for spec in specs], builtin="published-tables")

    assert table.columns == ["table", "run", "measured", "published figure"]
    assert list(dict.fromkeys(row[0] for row in table.rows)) == [
        "thirty-step", "mixed-overflow", "gradient-accumulation", "scale-change", "dtype-assertion",
    ]  # fmt: skip
    assert all(row[3] for row in table.rows), "a run has no figure to be held against"
    assert None not in table.checks


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"verdict": Verdict.INCONCLUSIVE, "failure": FailureKind.TASK_ERROR}, "failed: task_error"),
        ({"verdict": None, "failure": FailureKind.CONFIG_REFUSED}, "failed: config_refused"),
        ({"verdict": Verdict.POISONED, "verdict_step": 4, "failure": FailureKind.TASK_ERROR}, "poisoned at step 4"),
        ({**DEATH, "failure": FailureKind.LOSS_SCALE_EXHAUSTED}, "dies at step 17"),
    ],
)
def test_a_run_that_failed_before_it_proved_anything_says_what_failed(changes: dict[str, Any], outcome: str) -> None:
    table = build_table([result(**{"status": RunStatus.FAILED, **changes})])

    assert dict(zip(table.columns, table.rows[0], strict=True))["outcome"] == outcome
