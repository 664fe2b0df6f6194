"""One name, two quantities: what is not the same in both runs is held against nothing, and is said."""

from typing import Any

import pytest

from muonscope.contract.status import MomentumUnit
from service.analysis.comparison import Side, compare, first_divergence, is_comparable
from service.analysis.quantities import clipping
from tests.unit.analysis.columns import columns

STOCK = {"implementation": "deepspeed", "gradient_clipping": 1.0, "clip_scope": "update", "precision": "fp16"}
OURS = {"implementation": "muon_core", "gradient_clipping": 1.0, "clip_scope": "gradient", "precision": "fp16"}
ADAMW = {**STOCK, "clip_scope": "gradient", "task": {"name": "external", "optimizer": "AdamW"}}


def side(spec: dict[str, Any], unit: MomentumUnit = MomentumUnit.UNSCALED, num_steps: int = 4, **series: Any) -> Side:
    return Side(spec, columns(num_steps, **series), unit)


def test_a_norm_of_the_update_and_one_of_the_gradient_are_no_divergence_and_are_told() -> None:
    stock, ours = side(STOCK, grad_norm=[7.254] * 4), side(OURS, grad_norm=[0.6081] * 4)

    answer = compare(stock, ours)

    assert answer["first_divergence"] is None
    assert answer["not_compared"] == [
        {"quantity": "grad_norm", "a": "the norm of the update", "b": "the norm of the gradient"}
    ]
    assert answer["explanation"].startswith("What both record of the same quantities is equal")


def test_what_is_the_same_quantity_still_parts_two_runs_whose_norms_are_not() -> None:
    stock, ours = side(STOCK, grad_norm=[7.0] * 4, loss=[1.0, 1.0, 2.0, 1.0]), side(OURS)

    divergence = first_divergence(stock, ours)

    assert divergence is not None
    assert (divergence.step, divergence.scalars) == (2, ("loss",))


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        (STOCK, {**STOCK, "gradient_clipping": 0.0, "clip_scope": "gradient"}),
        (OURS, {**OURS, "clip_scope": "update"}),
        (OURS, ADAMW),
    ],
    ids=["stock clips or not", "muon_core whatever it clips", "muon_core and AdamW"],
)
def test_norms_of_one_kind_are_compared(spec: dict[str, Any], other: dict[str, Any]) -> None:
    one, another = side(spec, grad_norm=[2.0] * 4), side(other, grad_norm=[3.0] * 4)

    assert compare(one, another)["first_divergence"]["scalar"] == "grad_norm"
    assert "grad_norm" not in {entry["quantity"] for entry in compare(one, another)["not_compared"]}


@pytest.mark.parametrize(("precision", "is_same"), [("fp16", False), ("fp32", True), ("bf16", True)])
def test_a_momentum_in_units_of_the_loss_scale_is_another_only_where_there_is_one(
    precision: str, is_same: bool
) -> None:
    stock = side({**STOCK, "precision": precision}, MomentumUnit.LOSS_SCALED, momentum_norm=[16.0] * 4)
    ours = side({**OURS, "precision": precision})

    assert is_comparable(stock, ours, "momentum_norm") is is_same
    told = [entry["a"] for entry in compare(stock, ours)["not_compared"] if entry["quantity"] == "momentum_norm"]
    assert told == ([] if is_same else ["the norm of Muon's momentum times the loss scale"])


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [("AdamW", "Adam's first moment"), ("DeepSpeedCPUAdam", "Adam's first moment"), ("SGD", "SGD's momentum")],
)
def test_what_another_optimizer_keeps_is_not_compared_with_muons_momentum(optimizer: str, kept: str) -> None:
    other = side(ADAMW | {"task": {"name": "external", "optimizer": optimizer}}, momentum_norm=[2.0] * 4)
    ours = side(OURS, momentum_norm=[3.0] * 4)

    answer = compare(other, ours)

    assert answer["not_compared"] == [
        {"quantity": "momentum_norm", "a": f"the norm of {kept}", "b": "the norm of Muon's momentum"}
    ]
    assert answer["first_divergence"] is None
    assert answer["final"]["momentum_norm"] == {"a": 2.0, "b": 3.0, "difference": None}


def test_first_moments_of_two_adams_are_one_quantity() -> None:
    one, another = (
        side(ADAMW | {"task": {"name": "external", "optimizer": optimizer}}, momentum_norm=[norm] * 4)
        for optimizer, norm in (("AdamW", 2.0), ("FusedAdam", 3.0))
    )

    answer = compare(one, another)

    assert (answer["not_compared"], answer["first_divergence"]["scalar"]) == ([], "momentum_norm")
    assert answer["final"]["momentum_norm"]["difference"] == 1.0


def test_a_loss_scale_is_no_divergence_from_a_run_that_has_none() -> None:
    scaled, unscaled = (side({"precision": precision}, loss_scale_before=[scale] * 4)
                        for precision, scale in (("fp16", 65536.0), ("fp32", 1.0)))  # fmt: skip

    answer = compare(scaled, unscaled)

    assert (answer["first_divergence"], answer["not_compared"]) == (None, [])


def test_what_one_run_never_measured_is_not_told_as_another_quantity() -> None:
    assert compare(side(STOCK, grad_norm=[None] * 4), side(OURS))["not_compared"] == []


def test_clipping_acted_on_the_applied_steps_whose_norm_is_over_the_limit() -> None:
    norms = [1.5, 1.0, 0.5, 9.0]

    assert clipping(STOCK, columns(4, grad_norm=norms, discarded=[3])) == {
        "limit": 1.0, "scope": "update", "applied": 3, "acted": 1,
    }  # fmt: skip
    assert clipping({**OURS, "gradient_clipping": 0.0}, columns(4, grad_norm=norms)) is None


def test_how_often_clipping_acted_is_not_said_where_another_norm_was_recorded() -> None:
    found = clipping({**OURS, "clip_scope": "update"}, columns(4, grad_norm=[9.0] * 4))

    assert found == {"limit": 1.0, "scope": "update", "applied": 4, "acted": None}


def test_a_scale_that_a_precision_does_not_have_is_not_compared_as_one() -> None:
    scales = {"loss_scale_before": [1.0] * 4, "loss_scale_after": [1.0] * 4}
    answer = compare(side({"precision": "fp32"}, **scales), side({"precision": "fp16"}, **scales))

    assert (answer["loss_scale"]["a"]["initial"], answer["loss_scale"]["b"]["initial"]) == (None, 1.0)
    assert (answer["final"]["loss_scale_after"]["a"], answer["final"]["loss_scale_after"]["b"]) == (None, 1.0)
