"""The emulations on the installed DeepSpeed against the unmodified releases whose order they imitate."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.releases import DEFAULT_DEEPSPEED
from tests.integration.releases.conftest import Train, installed

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "deepspeed.json").read_text())
# The same float16 or float32 arithmetic; norms are recorded as float32, which resolves 1.2e-7.
RTOL = 1e-6

CALM_BOOM: dict[str, Any] = {
    "task": {"name": "calm_boom"},
    "optimizer": {"momentum": 0.9, "lr": 0.01},
    "loss_scale": {"initial_power": 4},
    "micro_batch_size": 1,
    "steps": 4,
}
# At a loss scale of 1 the division by it, which the releases do besides, changes nothing: weights and with them
# gradients and momentum stay comparable over many steps. Bias-free, so that nobody's AdamW takes part; with the
# standard iteration, for the rounding of the other one changed between 0.19.2 and 0.19.8.
PAIR: dict[str, Any] = {
    "task": {"name": "matrix_pair", "width": 32},
    "world_size": 2,
    "optimizer": {"ns_method": "standard"},
    "loss_scale": {"static": 1.0},
    "micro_batch_size": 4,
    "steps": 5,
}
# Weights that stay put, so that no Newton-Schulz rounding reaches the gradients; in float32, where neither side scales.
WINDOW: dict[str, Any] = {
    "task": {"name": "matrix_pair", "width": 32},
    "zero_stage": 3,
    "precision": "fp32",
    "optimizer": {"lr": 0.0},
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "steps": 3,
}
THIRTY: dict[str, Any] = {"optimizer": {"lr": 0.05}, "steps": 30}


def emulated(ordering: str, spec: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**spec, "implementation": "deepspeed", "step_ordering": ordering, **fields}


# By release (None: the installed DeepSpeed), the specs that train under it; one process each, for all tests.
SPECS: dict[str | None, dict[str, dict[str, Any]]] = {
    "0.17.6": {"calm_boom": CALM_BOOM, "pair": PAIR},
    "0.19.2": {
        "calm_boom": CALM_BOOM,
        "pair, stage 2": {**PAIR, "zero_stage": 2},
        "window": WINDOW,
        "thirty": THIRTY,
    },
    "0.19.7": {"calm_boom": CALM_BOOM, "calm_boom, stage 3": {**CALM_BOOM, "zero_stage": 3}, "thirty": THIRTY},
    None: {
        "master": emulated("master", CALM_BOOM),
        "per_tensor": emulated("per_tensor", CALM_BOOM),
        "pair": emulated("master", PAIR),
        "pair, stage 2": emulated("master", PAIR, zero_stage=2),
        "window": {**WINDOW, "step_ordering": "master"},
        "window, ordered": {**WINDOW, "step_ordering": "ordered"},
    },
}


@pytest.fixture(scope="module")
def results(train: Train) -> Any:
    """`results(version, name)`: what came of a spec, each release's trained once."""

    @cache
    def of(version: str | None) -> dict[str, Any]:
        specs = SPECS[version]
        named = [spec if version is None else {**spec, "deepspeed": {"version": version}} for spec in specs.values()]
        return dict(zip(specs, train(version, named), strict=True))

    return lambda version, name: of(version)[name]


def norms(result: Any) -> list[list[float]]:
    return [record["parameter_norms"] for record in result["records"]]


def is_close(one: float, two: float) -> bool:
    return one == two or (math.isnan(one) and math.isnan(two)) or math.isclose(one, two, rel_tol=RTOL)


def all_close(one: list[list[float]], two: list[list[float]]) -> bool:
    assert len(one) == len(two) > 1
    return all(is_close(a, b) for row, other in zip(one, two, strict=True) for a, b in zip(row, other, strict=True))


@pytest.mark.parametrize(
    ("version", "release_case", "emulation"),
    [
        ("0.17.6", "calm_boom", "master"),
        ("0.19.2", "calm_boom", "master"),
        ("0.17.6", "pair", "pair"),
        ("0.19.2", "pair, stage 2", "pair, stage 2"),
        ("0.19.7", "calm_boom, stage 3", "per_tensor"),
    ],
)
def test_an_emulation_equals_the_release_that_has_its_order(
    results: Any, version: str, release_case: str, emulation: str
) -> None:
    released, imitated = results(version, release_case), results(None, emulation)

    assert all_close(norms(released), norms(imitated))
    assert [record["overflow"] for record in released["records"]][:2] == [
        record["overflow"] for record in imitated["records"]
    ][:2]
    assert any(norm > 0 for row in norms(imitated) for norm in row)


@pytest.mark.parametrize(
    ("version", "release_case", "emulation"),
    [("0.19.2", "calm_boom", "per_tensor"), ("0.19.7", "calm_boom, stage 3", "master")],
)
def test_another_order_is_told_apart(results: Any, version: str, release_case: str, emulation: str) -> None:
    assert not all_close(norms(results(version, release_case)), norms(results(None, emulation)))


def test_our_master_at_stage_3_moves_the_momentum_per_micro_batch_as_the_releases_did(results: Any) -> None:
    released, ours, ordered = (
        results(version, name) for version, name in (("0.19.2", "window"), (None, "window"), (None, "window, ordered"))
    )

    assert all_close(norms(released), norms(ours))
    assert [record["ns_calls"] for record in released["records"]] == [8, 8, 8]
    assert not all_close(norms(ordered), norms(ours)), "the control: once per step is something else"


@pytest.mark.parametrize(
    ("version", "case", "stage"),
    [
        ("0.17.6", "calm_boom", 1),
        ("0.19.2", "calm_boom", 1),
        ("0.19.7", "calm_boom", 1),
        ("0.19.7", "calm_boom, stage 3", 3),
    ],
)
def test_a_release_shows_its_own_published_norms(results: Any, version: str, case: str, stage: int) -> None:
    (golden,) = [row["r"]["rows"] for row in GOLDEN["calm_boom"][version] if row["stage"] == stage]
    records = results(version, case)["records"]

    assert all_close([record["parameter_norms"] for record in records], [row["after_step"] for row in golden])
    assert [record["overflow"] for record in records] == [row["overflow"] for row in golden]


def test_0_19_7_keeps_no_momentum_at_stage_1_but_of_the_last_matrix(results: Any) -> None:
    calm, boom = zip(*norms(results("0.19.7", "calm_boom")), strict=True)

    assert calm == (0.0, 0.0, 0.0, 0.0)
    assert boom[0] > 0


def test_thirty_steps_die_under_0_19_2_and_barely_move_under_0_19_7(results: Any) -> None:
    poisoned, divided = results("0.19.2", "thirty"), results("0.19.7", "thirty")

    assert (poisoned["error"], poisoned["attempting"], poisoned["final"]["parameters_moved"]) == (
        "LossScaleExhausted", 17, 0,
    )  # fmt: skip
    assert divided["error"] is None
    assert divided["final"]["parameters_moved"] == 10
    # Each of its updates is divided by a loss scale of 32768: thirty of norm 11 and lr 0.05 stay below 1e-3.
    assert 0 < divided["final"]["max_weight_motion"] < 1e-3


@pytest.mark.parametrize("version", ["0.17.6", "0.19.2", "0.19.7"])
def test_the_release_that_was_asked_for_is_the_one_that_was_loaded(results: Any, version: str) -> None:
    loaded = results(version, "calm_boom")

    assert loaded["version"].split("+")[0] == version
    assert Path(loaded["file"]).is_relative_to(installed(version))
    assert results(None, "master")["version"].split("+")[0] == DEFAULT_DEEPSPEED


def test_a_discarded_step_has_no_norm_of_the_step_before(results: Any) -> None:
    records = results("0.19.2", "calm_boom")["records"]

    assert records[0]["grad_norm"] is not None
    assert [record["grad_norm"] for record in records if record["discarded"]] == [None] * 3
