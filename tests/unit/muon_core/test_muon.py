"""`muon_core.Muon` in plain torch, and the phases that the sharded optimizer shares with it."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from muon_core import Muon, route_parameters
from muon_core.muon import adamw_step_, batches_of_equal_shape, blend_momentum_, orthogonalize_directions_
from muon_core.parameters import MatrixShape, build_param_groups
from muon_core.reference import MuonReference, reference_adamw_step, reference_muon_step


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a script sets to build its model in half precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
@pytest.mark.parametrize("ns_method", ["standard", "gram", "polar_express"])
def test_five_steps_equal_the_float64_reference(nesterov: bool, shape: tuple[int, int], ns_method: str) -> None:
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, "ns_method": ns_method}
    weight = nn.Parameter(gaussian(*shape))
    state = MuonReference(weight.detach().double(), torch.zeros(shape, dtype=torch.float64))
    optimizer = Muon([weight], **options)  # type: ignore[arg-type]

    for step in range(5):
        weight.grad = gaussian(*shape, seed=step + 1)
        state = reference_muon_step(state, weight.grad, **options)  # type: ignore[arg-type]
        optimizer.step()

    # float32 against float64: five steps of up to 3e-4 relative error in an update of size lr.
    torch.testing.assert_close(weight.detach().double(), state.weight, rtol=0, atol=1e-4)
    buffer = optimizer.state[weight]["momentum_buffer"].double()
    torch.testing.assert_close(buffer, state.momentum_buffer, rtol=1e-5, atol=1e-6)


def test_it_follows_torchs_own_muon() -> None:
    ours, torchs = nn.Parameter(gaussian(10, 24)), nn.Parameter(gaussian(10, 24))
    optimizer = Muon([ours], lr=0.1, momentum=0.9, ns_method="standard")
    reference = torch.optim.Muon([torchs], lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=True)

    for step in range(3):
        ours.grad = gaussian(10, 24, seed=step)
        torchs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()

    # Theirs iterates in bfloat16: three updates of up to 2^-8 relative rounding each, times five products.
    assert (ours - torchs).norm() / (torchs - gaussian(10, 24)).norm() < 5e-2


def test_the_callers_gradient_is_untouched() -> None:
    weight = nn.Parameter(gaussian(4, 6))
    weight.grad = gaussian(4, 6, seed=1)
    before = weight.grad.clone()

    Muon([weight]).step()

    assert torch.equal(weight.grad, before)


def test_a_scaler_that_skips_a_step_leaves_the_momentum_unchanged() -> None:
    model = nn.Linear(6, 6, bias=False)
    optimizer = Muon(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        state = optimizer.state[model.weight]
        return state["momentum_buffer"].clone(), model.weight.detach().clone()

    first = step(gaussian(3, 6))
    discarded = step(gaussian(3, 6) * float("inf"))
    applied = step(gaussian(3, 6))

    assert torch.equal(discarded[0], first[0])
    assert torch.equal(discarded[1], first[1])
    assert scaler.get_scale() == 2.0**9
    # The counter-test: a Muon that never moves would pass the lines above.
    assert not torch.equal(applied[0], first[0])
    assert not torch.equal(applied[1], first[1])


def test_a_learning_rate_schedule_drives_each_group_from_its_own_rate() -> None:
    model = nn.Linear(4, 4)
    groups = build_param_groups(
        model, route_parameters(model), {"lr": 0.4}, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    )
    optimizer = Muon(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    optimizer.step()
    schedule.step()

    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.05]


def test_a_scaler_steps_over_an_optimizer_without_a_gradient() -> None:
    used, unused = nn.Parameter(gaussian(4, 6)), nn.Parameter(gaussian(4, 6))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [Muon([used]), Muon([unused])]

    scaler.scale(used.sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)

    assert not torch.equal(used, gaussian(4, 6))
    assert torch.equal(unused, gaussian(4, 6))


def test_state_survives_a_state_dict_round_trip() -> None:
    weights = [nn.Parameter(gaussian(5, 8)) for _ in range(2)]
    optimizers = [Muon([weight], lr=0.1) for weight in weights]
    weights[0].grad = gaussian(5, 8, seed=1)
    optimizers[0].step()

    weights[1].data.copy_(weights[0].data)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = gaussian(5, 8, seed=2)
        optimizer.step()

    assert torch.equal(weights[0], weights[1])


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = nn.Parameter(gaussian(3, 3))
    optimizer = Muon([weight])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
    assert not torch.equal(weight, before)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    idle, busy = nn.Parameter(gaussian(3, 3)), nn.Parameter(gaussian(3, 3))
    busy.grad = gaussian(3, 3, seed=1)
    optimizer = Muon([idle, busy])

    optimizer.step()

    assert torch.equal(idle, gaussian(3, 3))
    assert idle not in optimizer.state
    assert optimizer.ns_calls == 1


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="belongs to AdamW"):
        Muon([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": float("nan")}, {"lr": float("inf")}]
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Muon([nn.Parameter(torch.ones(2, 2))], **settings)  # type: ignore[arg-type]


def test_adamw_equals_torchs_to_the_last_bit_on_a_flat_partition() -> None:
    shapes = [(5, 7), (11,), (3, 3)]
    parameters = [nn.Parameter(gaussian(*shape)) for shape in shapes]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    group = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    torchs = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    state: dict[str, object] = {}

    for step in range(4):
        gradients = [gaussian(*shape, seed=step + 1) for shape in shapes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torchs.step()
        adamw_step_(flat, torch.cat([gradient.flatten() for gradient in gradients]), state, group)

    assert torch.equal(flat, torch.cat([parameter.detach().flatten() for parameter in parameters]))


def test_adamw_counts_its_steps_under_any_default_dtype() -> None:
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    weight, gradient, state = torch.zeros(2), torch.ones(2), {}  # type: ignore[var-annotated]

    with default_dtype(torch.bfloat16):
        for _ in range(258):
            adamw_step_(weight, gradient, state, group)

    # bfloat16 holds no 257: a count in it stays at 256, and with it the bias correction.
    assert state["step"].item() == 258


def test_adamw_equals_the_float64_reference() -> None:
    weight, state = gaussian(20), {}
    expected, first, second = weight.double(), torch.zeros(20).double(), torch.zeros(20).double()

    for step in range(1, 4):
        gradient = gaussian(20, seed=step)
        adamw_step_(weight, gradient, state, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})
        expected, first, second = reference_adamw_step(
            expected, gradient.double(), first, second, step=step, lr=0.1, weight_decay=0.1
        )

    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_blending_shards_gives_what_blending_the_whole_gives() -> None:
    gradient, buffer = gaussian(40), gaussian(40, seed=1)
    whole_buffer = buffer.clone()
    whole = blend_momentum_(gradient.clone(), whole_buffer, momentum=0.9, nesterov=True)
    shard_buffers = [part.clone() for part in buffer.split([13, 27])]

    shards = [
        blend_momentum_(part.clone(), shard, momentum=0.9, nesterov=True)
        for part, shard in zip(gradient.split([13, 27]), shard_buffers, strict=True)
    ]

    assert torch.equal(torch.cat(shards), whole)
    assert torch.equal(torch.cat(shard_buffers), whole_buffer)


def test_without_nesterov_the_direction_is_the_momentum_in_the_gradients_storage() -> None:
    gradient, buffer = gaussian(6), gaussian(6, seed=1)

    direction = blend_momentum_(gradient, buffer, momentum=0.9, nesterov=False)

    assert direction.data_ptr() == gradient.data_ptr() != buffer.data_ptr()
    assert torch.equal(direction, buffer)


def test_batches_hold_equal_shapes_and_stay_within_the_limit() -> None:
    shapes = [
        MatrixShape(1, 4, 6),
        MatrixShape(1, 6, 4),
        MatrixShape(2, 4, 6),
        MatrixShape(1, 4, 6),
        MatrixShape(9, 4, 6),
    ]

    batches = list(batches_of_equal_shape(shapes, 72))

    assert batches == [[0, 2], [3], [4], [1]]


@pytest.mark.parametrize("max_elements", [1, 100, 10**6])
def test_batch_limits_change_no_bit(max_elements: int) -> None:
    shapes = [MatrixShape(1, 4, 6), MatrixShape(2, 4, 6), MatrixShape(1, 6, 4), MatrixShape(1, 4, 6)]
    directions = [gaussian(shape.numel, seed=i) for i, shape in enumerate(shapes)]
    limited = [direction.clone() for direction in directions]

    orthogonalize_directions_(directions, shapes, ns_method="gram", ns_steps=5)
    orthogonalize_directions_(limited, shapes, ns_method="gram", ns_steps=5, max_elements=max_elements)

    assert all(torch.equal(a, b) for a, b in zip(directions, limited, strict=True))
    # Tall updates have the RMS of square ones: their norm is sqrt(6 / 4) larger.
    assert directions[2].norm() / directions[0].norm() == pytest.approx((6 / 4) ** 0.5, rel=0.3)


def test_a_saved_state_loads_as_plain_data_and_leaves_how_parameters_are_viewed() -> None:
    weight, other = nn.Parameter(gaussian(6, 4)), nn.Parameter(gaussian(6, 4))
    other.muon_num_heads = 2  # type: ignore[attr-defined]
    optimizer, resumed = Muon([weight]), Muon([other])
    weight.grad = gaussian(6, 4, seed=1)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)

    resumed.load_state_dict(torch.load(file, weights_only=True))

    buffers = [each.state[own]["momentum_buffer"] for each, own in ((optimizer, weight), (resumed, other))]
    assert torch.equal(*buffers)
    assert buffers[0].count_nonzero()
    assert resumed.param_groups[0]["matrices"] == [MatrixShape(2, 3, 4)]
    assert optimizer.param_groups[0]["matrices"] == [MatrixShape(1, 6, 4)]


def test_a_copied_optimizer_steps_as_the_first() -> None:
    weight = nn.Parameter(gaussian(4, 4))
    pair = (weight, Muon([weight], iteration_dtype=torch.bfloat16, skip_nonfinite=True))
    copied = copy.deepcopy(pair)
    for parameter, optimizer in (pair, copied):
        parameter.grad = gaussian(4, 4, seed=1)
        optimizer.step()

    assert torch.equal(pair[0], copied[0])
    assert (copied[1].iteration_dtype, copied[1].skip_nonfinite, copied[1].ns_calls) == (torch.bfloat16, True, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"route": "Muon"}, "route='Muon' is unknown"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"ns_method": "newton"}, "ns_method='newton'"),
        ({"ns_steps": 2.5}, "ns_steps=2.5"),
        ({"route": "adamw", "betas": (1.5, 0.9)}, r"betas=\(1.5, 0.9\)"),
        ({"route": "adamw", "eps": -1.0}, "eps=-1.0"),
    ],
)
def test_a_groups_own_settings_are_refused_by_name_and_leave_no_group(
    settings: dict[str, object], message: str
) -> None:
    optimizer = Muon([nn.Parameter(gaussian(3, 3))])

    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(gaussian(3, 3))], **settings})

    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(gaussian(3))], "route": "adamw", "lr": 0.0})
    assert len(optimizer.param_groups) == 2


def test_a_refused_vector_leaves_an_optimizer_that_steps() -> None:
    weight = nn.Parameter(gaussian(3, 3))
    optimizer = Muon([weight])
    with pytest.raises(ValueError, match="belongs to AdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(gaussian(3))]})
    weight.grad = gaussian(3, 3, seed=1)

    optimizer.step()

    assert not torch.equal(weight, gaussian(3, 3))


@pytest.mark.parametrize("route", ["muon", "adamw"])
def test_a_sparse_gradient_is_refused_before_anything_moves(route: str) -> None:
    weight, table = nn.Parameter(gaussian(3, 3)), nn.Parameter(gaussian(5, 3))
    optimizer = Muon([{"params": [weight]}, {"params": [table], "route": route}], skip_nonfinite=True)
    weight.grad, table.grad = gaussian(3, 3, seed=1), gaussian(5, 3, seed=2).to_sparse()

    with pytest.raises(ValueError, match=r"shape \(5, 3\) in group 1 .*sparse=False"):
        optimizer.step()

    assert torch.equal(weight, gaussian(3, 3))
    table.grad = table.grad.to_dense()
    optimizer.step()
    assert not torch.equal(table, gaussian(5, 3))


def test_neighbours_in_another_dtype_or_place_change_no_bit() -> None:
    def stepped(*others: nn.Parameter) -> torch.Tensor:
        weight = nn.Parameter(gaussian(9, 4).bfloat16())
        for number, parameter in enumerate([weight, *others]):
            parameter.grad = gaussian(9, 4, seed=number + 1).to(parameter.device, parameter.dtype)
        Muon([weight, *others]).step()
        return weight.detach()

    elsewhere = nn.Parameter(torch.empty(9, 4, device="meta"))

    assert torch.equal(stepped(nn.Parameter(gaussian(9, 4)), elsewhere), stepped())


def test_an_empty_parameter_is_stepped_over() -> None:
    empty, weight = nn.Parameter(torch.empty(4, 0, 3, 3)), nn.Parameter(gaussian(3, 3))
    empty.grad, weight.grad = torch.empty(4, 0, 3, 3), gaussian(3, 3, seed=1)

    Muon([empty, weight], skip_nonfinite=True).step()

    assert not torch.equal(weight, gaussian(3, 3))
