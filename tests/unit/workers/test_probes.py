"""Numbers as they are: finite stays finite, and of non-finite ones the worst is named."""

import math

import pytest
import torch

from muon_core.norms import norms
from muonscope.contract.run_spec import Fault
from workers.errors import ConfigRefused
from workers.faults import FaultPlan
from workers.final_state import hash_tensors
from workers.parcels import Parcel
from workers.probes import float32_norms, largest
from workers.weights import local_weights


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([2.0, 2.0], 0),
        ([1.0, math.inf, 3.0], 1),
        ([math.inf, math.nan], 1),
        ([math.nan, math.inf, math.nan], 0),
    ],
)
def test_the_largest_is_the_first_nan_then_the_first_infinity_then_the_largest_number(
    values: list[float], expected: int
) -> None:
    assert largest(values) == expected


def test_norms_of_large_finite_tensors_stay_finite() -> None:
    measured = norms([torch.tensor([1e30, 1e30]), torch.full((4,), 60000.0).half()])

    assert measured[0].item() == pytest.approx(math.sqrt(2) * 1e30, rel=1e-6)
    assert measured[1].item() == pytest.approx(120000, rel=1e-3)


@pytest.mark.gpu
def test_norms_of_tensors_on_two_devices_meet_on_the_first() -> None:
    measured = norms([torch.full((4,), 2.0).half(), torch.full((9,), 3.0, device="cuda")])

    assert measured.device.type == "cpu"
    assert measured.tolist() == [4.0, 9.0]


def test_norms_tell_nan_from_infinity() -> None:
    measured = norms([torch.tensor([math.inf, 1.0]), torch.tensor([math.nan, math.inf]), torch.zeros(2)])

    assert [str(value) for value in measured.tolist()] == ["inf", "nan", "0.0"]


def test_a_finite_norm_beyond_float32_is_its_largest_number_and_infinity_stays_infinite() -> None:
    squares = torch.tensor([25.0, 1e80, math.inf, math.nan, 0.0], dtype=torch.float64)

    assert [str(value) for value in float32_norms(squares)] == ["5.0", "3.4028234663852886e+38", "inf", "nan", "0.0"]


def test_a_parcel_used_again_starts_from_zero_and_carries_its_own_tail() -> None:
    parcel = Parcel(2, 1, torch.device("cpu"), None)
    parcel.fill([5.0])
    parcel.vector[1] = 3.0
    parcel.send()
    first = parcel.read().tolist()

    parcel.fill([6.0])
    parcel.send()

    assert first == [0.0, 3.0, 5.0]
    assert parcel.read().tolist() == [0.0, 0.0, 6.0]


@pytest.mark.gpu
def test_on_a_gpu_two_parcels_under_way_keep_apart() -> None:
    parcels = [Parcel(1, 1, torch.device("cuda", 0), None) for _ in range(2)]
    for number, parcel in enumerate(parcels):
        parcel.fill([float(number)])
        parcel.vector[0] = 10.0 + number
        parcel.send()

    assert [parcel.read().tolist() for parcel in parcels] == [[10.0, 0.0], [11.0, 1.0]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_over_all_ranks_every_weight_is_answered_for_exactly_once(world_size: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (4, 1, 7, 2)]

    seen = [piece.index for rank in range(world_size) for piece in local_weights(parameters, rank, world_size)]

    assert sorted(seen) == [0, 1, 2, 3]


def test_a_zero_three_partition_ends_where_its_parameter_ends() -> None:
    parameter = torch.nn.Parameter(torch.zeros(0))
    pieces = []
    for rank in range(3):
        parameter.ds_tensor, parameter.ds_numel = torch.arange(4.0), 9  # type: ignore[attr-defined]
        pieces += local_weights([parameter], rank, 3)

    assert [(piece.start, piece.values.numel()) for piece in pieces] == [(0, 4), (4, 4), (8, 1)]


def test_hashes_tell_values_shapes_and_types_apart() -> None:
    base = torch.arange(6.0)
    others = [base + 1, base.view(2, 3), base.half(), base[:5]]

    assert hash_tensors([base]) == hash_tensors([base.clone()])
    assert len({hash_tensors([tensor]) for tensor in [base, *others]}) == 5


def model_with_gradients(plan_for_rank: int) -> tuple[torch.nn.Linear, FaultPlan]:
    model = torch.nn.Linear(3, 2)
    faults = (Fault(kind="inf", step=2, rank=1, micro_batch=1, parameter="weight"), Fault(kind="nan", step=3, rank=1))
    return model, FaultPlan(faults, model, plan_for_rank)


@pytest.mark.parametrize(
    ("rank", "step", "micro_batch", "is_planted"),
    [(1, 2, 1, True), (1, 2, 0, False), (1, 1, 1, False), (0, 2, 1, False)],
)
def test_a_gradient_fault_strikes_its_place_alone(rank: int, step: int, micro_batch: int, is_planted: bool) -> None:
    model, plan = model_with_gradients(rank)

    with plan.planted(step, micro_batch):
        model(torch.ones(1, 3)).sum().backward()

    assert model.weight.grad is not None
    assert model.bias.grad is not None
    assert int((~model.weight.grad.isfinite()).sum()) == int(is_planted)
    assert bool(model.bias.grad.isfinite().all())


def test_a_fault_is_gone_after_its_micro_batch() -> None:
    model, plan = model_with_gradients(1)
    with plan.planted(2, 1):
        pass

    model(torch.ones(1, 3)).sum().backward()

    assert model.weight.grad is not None
    assert bool(model.weight.grad.isfinite().all())


def test_a_loss_fault_makes_every_gradient_non_finite() -> None:
    model, plan = model_with_gradients(1)

    plan.in_loss(3, 0, model(torch.ones(1, 3)).sum()).backward()

    assert model.bias.grad is not None
    assert not bool(model.bias.grad.isfinite().any())
    assert plan.in_loss(2, 0, torch.tensor(1.0)).item() == 1.0


def test_a_fault_in_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigRefused, match=r"faults\[0\].parameter='bais'"):
        FaultPlan((Fault(kind="inf", step=0, parameter="bais"),), torch.nn.Linear(2, 2), 0)
