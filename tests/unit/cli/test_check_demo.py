"""The check that CI holds the demo's table with: it knows the published table and tells every other one from it."""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from muonscope.contract.published import THIRTY_STEP, published_result
from muonscope.contract.run_spec import LossScale, RunSpec
from muonscope.contract.status import StepOrdering, Verdict

COLUMNS = ["stage", "initial scale", "ordering", "moved", "momentum finite", "outcome"]
COLUMNS += ["overflows", "final scale", "largest weight motion"]
TABLE: dict[str, Any] = {
    "columns": COLUMNS,
    "rows": [
        [stage, scale, ordering, *(["0/10", False, "dies at step 17", 17, 1, 0.0] if dies else trains)]
        for stage in (1, 2)
        for scale, trains in (
            (65536, ["10/10", True, "trains", 2, 32768, 8.0]),
            (1, ["10/10", True, "trains", 0, 1, 8.6]),
        )
        for ordering in ("master", "ordered")
        for dies in [(scale, ordering) == (65536, "master")]
    ],
}


@pytest.fixture(scope="module")
def check_demo() -> ModuleType:
    path = Path(__file__).parents[3] / ".ci" / "check_demo.py"
    spec = importlib.util.spec_from_file_location("check_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_table_passes(check_demo: ModuleType) -> None:
    assert check_demo.differences(TABLE) == []


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (0, "moved", "10/10"),
        (0, "momentum finite", True),
        (0, "outcome", "dies at step 16"),
        (0, "overflows", 16),
        (0, "final scale", 2),
        (0, "largest weight motion", 1e-5),
        (1, "outcome", "stalled"),
        (1, "largest weight motion", 1e-5),
        (1, "largest weight motion", float("inf")),
        (7, "ordering", "master"),
    ],
)
def test_each_figure_that_differs_fails(row: int, column: str, value: Any, check_demo: ModuleType) -> None:
    table = copy.deepcopy(TABLE)
    table["rows"][row][COLUMNS.index(column)] = value

    assert check_demo.differences(table) != []


def test_a_missing_row_fails(check_demo: ModuleType) -> None:
    assert check_demo.differences(TABLE | {"rows": TABLE["rows"][1:]}) == ["there is no row for (1, 65536, 'master')"]


def test_both_tables_of_published_figures_say_the_same(check_demo: ModuleType) -> None:
    for (stage, scale, ordering), row in check_demo.PUBLISHED.items():
        spec = RunSpec(
            zero_stage=stage,
            loss_scale=LossScale(initial_power=scale.bit_length() - 1),
            step_ordering=StepOrdering(ordering),
        )
        published = published_result(THIRTY_STEP, spec)
        assert published is not None
        assert (published.verdict is Verdict.DIES) == row["outcome"].startswith("dies")
        assert f"{published.parameters_moved}/{published.parameters_total}" == row["moved"]
        assert published.momentum_finite == row["momentum finite"]
