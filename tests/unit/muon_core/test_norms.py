"""Squared norms of many tensors at once, with the kernels and without."""

import math

import pytest
import torch
from torch import Tensor

from muon_core.kernels import device_has_kernels, kernels
from muon_core.norms import SquaredNorms

CPU = torch.device("cpu")


def test_each_norm_goes_to_its_place_and_the_rest_is_left_alone() -> None:
    out = torch.full((4,), -1.0, dtype=torch.float64)

    SquaredNorms([torch.tensor([3.0, 4.0]), torch.tensor([2.0])], [3, 1], CPU).write(out)

    assert out.tolist() == pytest.approx([-1.0, 4.0, -1.0, 25.0])


def test_what_is_read_is_what_lies_there_now() -> None:
    tensor, out = torch.ones(3), torch.zeros(1, dtype=torch.float64)
    norms = SquaredNorms([tensor], [0], CPU)

    tensor.fill_(2.0)
    norms.write(out)

    assert out.item() == pytest.approx(12.0)


def test_no_tensor_writes_nothing() -> None:
    out = torch.full((2,), 7.0, dtype=torch.float64)

    SquaredNorms([], [], CPU).write(out)

    assert out.tolist() == [7.0, 7.0]


def uneven(dtype: torch.dtype) -> list[Tensor]:
    """Views of one buffer, whole blocks, parts of one and single elements among them, not all of them aligned."""
    sizes = [8192, 3 * 8192 + 5, 1, 16, 70_001, 8192 * 1100]
    whole = torch.randn(sum(sizes), generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    return list(whole.split(sizes))


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available() or not device_has_kernels(torch.device("cuda")):
        pytest.skip("needs a GPU of compute capability 9, and triton")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("aligned_alone", [False, True])
def test_the_kernels_and_torchs_norms_agree(device: torch.device, dtype: torch.dtype, aligned_alone: bool) -> None:
    tensors = uneven(dtype)[:1] if aligned_alone else uneven(dtype)
    places = list(reversed(range(len(tensors))))
    found = {}
    for mode in ("auto", "off"):
        found[mode] = torch.full((len(tensors) + 1,), -1.0, dtype=torch.float64, device=device)
        with kernels(mode):  # type: ignore[arg-type]
            SquaredNorms(tensors, places, device).write(found[mode])

    # Float64 sums in another order, and the root that torch takes and we square again.
    torch.testing.assert_close(found["auto"], found["off"], rtol=1e-13, atol=0.0)
    assert found["auto"][-1].item() == -1.0


@pytest.mark.gpu
def test_the_kernels_sums_never_change_from_call_to_call(device: torch.device) -> None:
    tensors = uneven(torch.float32)
    norms = SquaredNorms(tensors, list(range(len(tensors))), device)
    first, second = (torch.zeros(len(tensors), dtype=torch.float64, device=device) for _ in range(2))

    norms.write(first)
    norms.write(second)

    assert torch.equal(first, second)


@pytest.mark.gpu
def test_the_kernels_tell_large_numbers_infinity_and_nan_apart(device: torch.device) -> None:
    values = [[1e30, 1e30], [math.inf, 1.0], [-math.inf, math.nan], [0.0, 0.0]]
    tensors = [torch.tensor(pair, device=device) for pair in values]
    out = torch.zeros(4, dtype=torch.float64, device=device)

    SquaredNorms(tensors, [0, 1, 2, 3], device).write(out)

    assert out[0].item() == pytest.approx(2e60, rel=1e-6)
    assert [str(value) for value in out[1:].tolist()] == ["inf", "nan", "0.0"]
