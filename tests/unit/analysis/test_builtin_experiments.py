"""The built-in experiments: what they ask, and which options leave their published figures valid."""

import pytest

from muonscope.contract.releases import RELEASES
from muonscope.contract.run_spec import RunSpec
from service.analysis import builtin_experiments
from service.errors import InvalidInput


@pytest.mark.parametrize("name", builtin_experiments.BUILTIN_NAMES)
def test_every_cell_of_every_built_in_is_a_run_that_can_be_submitted(name: str) -> None:
    built = builtin_experiments.build(name, {})

    assert built.cells
    assert len({RunSpec.model_validate(cell.spec).fingerprint() for cell in built.cells}) == len(built.cells)


def test_the_thirty_step_table_has_eight_cells_in_its_published_order() -> None:
    cells = builtin_experiments.build("thirty-step", {}).cells

    assert [tuple(cell.values.values()) for cell in cells] == [
        (stage, power, ordering) for stage in (1, 2) for power in (16, 0) for ordering in ("master", "ordered")
    ]


@pytest.mark.parametrize("name", builtin_experiments.BUILTIN_NAMES)
def test_sharing_a_gpu_changes_where_a_run_stands_and_none_of_its_numbers(name: str) -> None:
    alone = [RunSpec.model_validate(cell.spec) for cell in builtin_experiments.build(name, {}).cells]
    shared = [RunSpec.model_validate(c.spec) for c in builtin_experiments.build(name, {"gpus_per_rank": 0.5}).cells]

    assert {spec.resources.gpus_per_rank for spec in shared} == {0.5}
    assert [spec.fingerprint() for spec in shared] == [spec.fingerprint() for spec in alone]


def test_an_option_that_an_experiment_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(InvalidInput, match="does not take the option text") as caught:
        builtin_experiments.build("thirty-step", {"text": "/tmp"})

    assert caught.value.field == "text"
    assert "gpus_per_rank" in str(caught.value.remedy)


@pytest.mark.parametrize("name", builtin_experiments.BUILTIN_NAMES)
@pytest.mark.parametrize("version", ["0.19.2", "0.19.7", "0.19.8"])
def test_under_a_release_every_cell_runs_as_it_was_released(name: str, version: str) -> None:
    built = builtin_experiments.build(name, {"deepspeed": version})
    specs = [RunSpec.model_validate(cell.spec) for cell in built.cells]

    assert specs
    assert {spec.step_ordering for spec in specs} <= set(RELEASES[version].orderings.values())
    assert len({spec.fingerprint() for spec in specs}) == len({spec.name for spec in specs}) == len(specs)
    assert not any("step_ordering" in cell.values or "implementation" in cell.values for cell in built.cells)


def test_runs_that_differ_in_their_ordering_alone_become_one_under_a_release() -> None:
    built = builtin_experiments.build("thirty-step", {"deepspeed": "0.17.6"})

    assert [cell.spec["name"] for cell in built.cells] == [
        f"thirty-step zero_stage={stage} initial_power={power}" for stage in (1, 2) for power in (16, 0)
    ]
    assert built.matrix == {"zero_stage": [1, 2], "loss_scale.initial_power": [16, 0]}


def test_stages_that_a_release_does_not_have_are_left_out() -> None:
    later, earlier = (builtin_experiments.build("mixed-overflow", {"deepspeed": v}) for v in ("0.19.2", "0.18.2"))

    assert [cell.values["zero_stage"] for cell in later.cells] == [1, 3]
    assert [cell.values["zero_stage"] for cell in earlier.cells] == [1]


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("gradient-accumulation", "0.17.6", "has no run at a ZeRO stage that DeepSpeed 0.17.6's Muon has"),
        ("thirty-step", "0.1.0", "is not on the allow-list"),
        ("thirty-step", ["0.19.2"], "is not on the allow-list"),
    ],
)
def test_a_release_that_cannot_answer_is_refused(name: str, version: object, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected) as caught:
        builtin_experiments.build(name, {"deepspeed": version})

    assert caught.value.field == "deepspeed"
