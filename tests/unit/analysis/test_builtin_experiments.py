"""The built-in experiments: what they ask, and which options leave their published figures valid."""

import pytest

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
