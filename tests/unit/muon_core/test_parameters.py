"""Routing: every parameter, its route and the reason; and how Muon views each shape."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from muon_core import Muon, build_optimizer, route_parameters
from muon_core.parameters import MatrixShape, build_param_groups, matrix_shape


class Zoo(nn.Module):
    """One parameter of every kind that models bring."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embed = nn.Parameter(torch.ones(10, 8))
        self.wte = nn.Embedding(10, 8)
        self.proj = nn.Linear(8, 8)
        self.conv = nn.Conv2d(3, 6, 5, bias=False)
        self.temporal = nn.Conv1d(4, 8, 3, bias=False)
        self.experts = nn.Parameter(torch.ones(4, 6, 8))
        self.layer_scale = nn.Parameter(torch.ones(6, 1, 1))
        self.value_head = nn.Linear(8, 1, bias=False)
        self.frozen = nn.Parameter(torch.ones(8, 8), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 8))
        self.lm_head = nn.Linear(8, 10, bias=False)


def test_each_kind_goes_where_it_belongs_and_says_why() -> None:
    routed = {entry.name: (entry.route, entry.reason) for entry in route_parameters(Zoo())}

    assert routed == {
        "tok_embed": ("adamw", "its name contains 'embed'"),
        "wte.weight": ("adamw", "is an embedding"),
        "proj.weight": ("muon", "is a matrix"),
        "proj.bias": ("adamw", "has fewer than two dimensions"),
        "conv.weight": ("muon", "is a stack of matrices or a convolution"),
        "temporal.weight": ("muon", "is a stack of matrices or a convolution"),
        "experts": ("muon", "is a stack of matrices or a convolution"),
        "layer_scale": ("adamw", "has no two dimensions larger than one"),
        "value_head.weight": ("muon", "is a matrix"),
        "frozen": ("frozen", "requires no gradient"),
        "empty": ("frozen", "has no elements"),
        "lm_head.weight": ("adamw", "its name contains 'lm_head'"),
    }


def test_each_shape_is_viewed_as_the_matrices_it_holds() -> None:
    views = {entry.name: entry.matrices for entry in route_parameters(Zoo()) if entry.matrices}

    assert views == {
        "proj.weight": MatrixShape(1, 8, 8),
        "conv.weight": MatrixShape(1, 6, 75),
        "temporal.weight": MatrixShape(1, 8, 12),
        "experts": MatrixShape(4, 6, 8),
        "value_head.weight": MatrixShape(1, 1, 8),
    }


def test_indices_count_what_trains_first_and_are_unique() -> None:
    model = Zoo()
    routed = route_parameters(model)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    assert [entry.name for entry in sorted(routed, key=lambda entry: entry.index)][: len(trainable)] == trainable
    assert sorted(entry.index for entry in routed) == list(range(len(routed)))


def test_tied_weights_are_decided_once_by_all_their_modules() -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 10, bias=False), "wte": nn.Embedding(10, 8)})
    model["first"].weight = model["wte"].weight

    routed = route_parameters(model)

    assert [(entry.name, entry.route, entry.reason) for entry in routed] == [
        ("first.weight", "adamw", "is an embedding")
    ]


def test_name_patterns_override_the_rules() -> None:
    routed = route_parameters(Zoo(), muon=["tok_*"], adamw=["proj.*", "experts"])
    routes = {entry.name: (entry.route, entry.reason) for entry in routed}

    assert routes["tok_embed"] == ("muon", "named by the pattern 'tok_*'")
    assert routes["proj.weight"] == ("adamw", "named by the pattern 'proj.*'")
    assert routes["experts"][0] == "adamw"


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'attn\.\*' matches no parameter"):
        route_parameters(Zoo(), muon=["attn.*"])


def test_a_vector_cannot_be_sent_to_muon() -> None:
    with pytest.raises(ValueError, match=r"proj\.bias has shape \(8,\)"):
        route_parameters(Zoo(), muon=["proj.bias"])


def test_no_muon_parameter_at_all_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        route_parameters(nn.LayerNorm(8))

    assert "no parameter is routed to Muon" in caplog.text


def test_a_muon_parameter_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        route_parameters(nn.Linear(8, 8))

    assert caplog.text == ""


def test_heads_are_read_from_each_parameter_and_never_a_neighbour() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 12, bias=False) for name in ("q", "k", "o")})
    model["q"].weight.muon_num_heads = 4  # type: ignore[assignment]
    model["k"].weight.muon_num_heads = 2  # type: ignore[assignment]

    views = [entry.matrices for entry in route_parameters(model)]

    assert views == [MatrixShape(4, 3, 8), MatrixShape(2, 6, 8), MatrixShape(1, 12, 8)]


def test_each_head_is_orthogonalized_on_its_own() -> None:
    whole = nn.Parameter(torch.zeros(12, 8))
    whole.muon_num_heads = 3  # type: ignore[attr-defined]
    heads = [nn.Parameter(torch.zeros(4, 8)) for _ in range(3)]
    gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    whole.grad = gradient
    for head, part in zip(heads, gradient.split(4), strict=True):
        head.grad = part.clone()

    Muon([whole], lr=1.0).step()
    Muon(heads, lr=1.0).step()

    assert torch.equal(whole, torch.cat(list(heads)))
    assert whole.norm() > 1


def test_heads_that_do_not_divide_the_rows_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(10, 8))
    weight.muon_num_heads = 4  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match="muon_num_heads=4"):
        matrix_shape(weight)


def test_a_convolution_is_updated_as_its_flattened_matrix() -> None:
    convolution, flat = nn.Parameter(torch.zeros(6, 3, 5, 5)), nn.Parameter(torch.zeros(6, 75))
    convolution.grad = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    flat.grad = convolution.grad.reshape(6, 75).clone()

    Muon([convolution], lr=1.0).step()
    Muon([flat], lr=1.0).step()

    assert torch.equal(convolution.reshape(6, 75), flat)


def test_a_tall_convolution_is_scaled_by_rows_and_flattened_columns() -> None:
    assert MatrixShape(1, 64, 27).aspect_scale == pytest.approx((64 / 27) ** 0.5)
    assert MatrixShape(1, 27, 64).aspect_scale == 1.0
    assert matrix_shape(nn.Parameter(torch.zeros(64, 3, 3, 3))).aspect_scale == pytest.approx((64 / 27) ** 0.5)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)

    with pytest.raises(ValueError, match="no trainable parameter"):
        build_param_groups(model, route_parameters(model), {}, {})


def test_fused_parts_are_orthogonalized_each_on_its_own() -> None:
    whole = nn.Parameter(torch.zeros(9, 8))
    whole.muon_row_splits = (4, 4, 1)  # type: ignore[attr-defined]
    parts = [nn.Parameter(torch.zeros(rows, 8)) for rows in (4, 4, 1)]
    whole.grad = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    for part, gradient in zip(parts, whole.grad.split((4, 4, 1)), strict=True):
        part.grad = gradient.clone()

    Muon([whole], lr=1.0).step()
    Muon(parts, lr=1.0).step()

    assert torch.equal(whole, torch.cat(list(parts)))
    assert whole.norm() > 1


def test_parts_are_read_from_each_parameter_and_never_a_neighbour() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 12, bias=False) for name in ("qkv", "o")})
    model["qkv"].weight.muon_row_splits = [8, 2, 2]  # type: ignore[assignment]

    views = [entry.matrices for entry in route_parameters(model)]

    assert views == [MatrixShape(1, 12, 8, (8, 2, 2)), MatrixShape(1, 12, 8)]
    assert views[0] is not None
    assert [block.rows for block in views[0].blocks] == [8, 2, 2]


@pytest.mark.parametrize(
    ("shape", "tags"),
    [
        ((9, 8), {"muon_row_splits": (4, 4)}),
        ((9, 8), {"muon_row_splits": (10, -1)}),
        ((9, 8), {"muon_row_splits": ()}),
        ((2, 3, 3), {"muon_row_splits": (1, 1)}),
        ((8, 8), {"muon_row_splits": (4, 4), "muon_num_heads": 2}),
    ],
)
def test_parts_that_do_not_fit_the_matrix_are_refused(shape: tuple[int, ...], tags: dict[str, object]) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    for name, value in tags.items():
        setattr(weight, name, value)

    with pytest.raises(ValueError, match="muon_row_splits"):
        matrix_shape(weight)


def test_a_parametrized_convolution_is_still_one() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3))

    routed = {entry.name: entry for entry in route_parameters(model)}

    assert routed["parametrizations.weight.original1"].matrices == MatrixShape(1, 8, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adam": {"betas": (0.9, 1.0)}}, "betas="),
        ({"adam": {"eps": -1.0}}, "eps=-1.0"),
        ({"iteration_dtype": torch.int32}, "iteration_dtype=torch.int32"),
        ({"wire_dtype": torch.int8}, "wire_dtype=torch.int8"),
    ],
)
def test_settings_of_the_sharded_optimizer_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(nn.Linear(3, 3), **settings)

    assert build_optimizer(nn.Linear(3, 3), wire_dtype=torch.bfloat16).param_groups
