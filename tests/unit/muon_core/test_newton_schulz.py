"""Orthogonalization against float64, against torch, and at the edges of float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_core import orthogonalize
from muon_core.newton_schulz import NS_METHODS, QUINTIC, coefficient_schedule
from muon_core.reference import polar_factor, reference_orthogonalize

SHAPES = [(16, 16), (24, 64), (64, 24), (1, 9), (9, 1), (7, 5), (3, 4, 12), (2, 3, 8, 20)]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows: int, cols: int, smallest: float) -> torch.Tensor:
    """A matrix whose singular values fall geometrically from 1 to `smallest`."""
    rank = min(rows, cols)
    u, _ = torch.linalg.qr(gaussian(rows, rank, seed=1).double())
    v, _ = torch.linalg.qr(gaussian(cols, rank, seed=2).double())
    return (u * torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), rank, dtype=torch.float64)) @ v.mT


def rank_four_plus_noise() -> torch.Tensor:
    return gaussian(32, 4, seed=3) @ gaussian(4, 80, seed=4) + 1e-3 * gaussian(32, 80, seed=5)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("ns_method", NS_METHODS)
@pytest.mark.parametrize(
    "matrix",
    [gaussian(32, 80), gaussian(80, 32), gaussian(48, 48), with_spectrum(32, 80, 1e-4), rank_four_plus_noise()],
)
def test_every_method_equals_the_float64_reference(ns_method: str, matrix: torch.Tensor) -> None:
    actual = orthogonalize(matrix.float(), ns_method=ns_method, iteration_dtype=torch.float32)

    # 6e-8 rounding, magnified by at most 3.4445^5 = 485 (8.3 * 4.1 * 3.9 * 3.3 * 2.3 for polar_express) where a
    # singular value is small; the Gram matrix squares the condition number, its restart takes that back.
    assert error(actual, reference_orthogonalize(matrix, ns_method=ns_method)) < 3e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 8e-2)])
@pytest.mark.parametrize("ns_method", NS_METHODS)
def test_half_precision_iterations_stay_near_the_reference(
    ns_method: str, dtype: torch.dtype, tolerance: float
) -> None:
    matrix = gaussian(32, 80)

    actual = orthogonalize(matrix, ns_method=ns_method, iteration_dtype=dtype)

    assert actual.dtype == torch.float32
    # About 10 roundings of 2^-11 (float16) or 2^-8 (bfloat16) in each of five steps.
    assert 0 < error(actual, reference_orthogonalize(matrix, ns_method=ns_method)) < tolerance


@pytest.mark.parametrize("ns_method", ["standard", "gram"])
def test_singular_values_fall_into_the_quintics_band(ns_method: str) -> None:
    values = torch.linalg.svdvals(orthogonalize(gaussian(40, 100), ns_method=ns_method))

    assert values.min() > 0.65
    assert values.max() < 1.2


def test_polar_express_comes_closer_to_the_polar_factor() -> None:
    matrix = gaussian(40, 100)
    errors = {name: error(orthogonalize(matrix, ns_method=name), polar_factor(matrix)) for name in NS_METHODS}

    # Five steps leave singular values within [0.85, 1.12], the quintic within [0.68, 1.20].
    assert errors["polar_express"] < 0.1 < errors["standard"]


def test_more_polar_express_steps_converge() -> None:
    matrix = with_spectrum(16, 48, 1e-3)

    actual = orthogonalize(matrix.float(), ns_method="polar_express", ns_steps=10)

    assert error(actual, polar_factor(matrix)) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ns_method", NS_METHODS)
def test_batches_give_what_single_matrices_give_to_the_last_bit(shape: tuple[int, ...], ns_method: str) -> None:
    matrices = gaussian(5, *shape)

    together = orthogonalize(matrices, ns_method=ns_method)

    assert together.shape == matrices.shape
    assert all(torch.equal(together[i], orthogonalize(matrices[i].clone(), ns_method=ns_method)) for i in range(5))


@pytest.mark.parametrize("ns_method", NS_METHODS)
def test_a_transposed_matrix_gives_the_transposed_result(ns_method: str) -> None:
    matrix = gaussian(24, 70)

    # The same products in the other orientation: float32 rounding only.
    torch.testing.assert_close(
        orthogonalize(matrix.mT, ns_method=ns_method).mT,
        orthogonalize(matrix, ns_method=ns_method),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ns_method", NS_METHODS)
@given(exponent=st.integers(-99, 99))
@settings(max_examples=20, deadline=None)
def test_powers_of_two_change_no_bit(dtype: torch.dtype, ns_method: str, exponent: int) -> None:
    matrix = gaussian(8, 20).clamp(min=0.01)

    scaled = orthogonalize(matrix * 2.0**exponent, ns_method=ns_method, iteration_dtype=dtype)

    assert torch.equal(scaled, orthogonalize(matrix, ns_method=ns_method, iteration_dtype=dtype))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e30])
@pytest.mark.parametrize("ns_method", NS_METHODS)
def test_extreme_inputs_give_what_one_gives(magnitude: float, ns_method: str) -> None:
    matrix = gaussian(12, 30)

    actual = orthogonalize(matrix * magnitude, ns_method=ns_method)

    # The products with 1e30 and 1e-30 round; nothing else differs.
    torch.testing.assert_close(actual, orthogonalize(matrix, ns_method=ns_method), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_callers_tensor_is_untouched(dtype: torch.dtype) -> None:
    matrix = gaussian(10, 30).to(dtype)
    before = matrix.clone()

    result = orthogonalize(matrix)

    assert torch.equal(matrix, before)
    assert result.dtype == dtype
    assert result.data_ptr() != matrix.data_ptr()


def test_zero_stays_zero_and_empty_stays_empty() -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 5)), torch.zeros(3, 5))
    assert orthogonalize(torch.zeros(0, 5)).shape == (0, 5)
    assert orthogonalize(torch.zeros(0, 4, 5)).shape == (0, 4, 5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("ns_method", NS_METHODS)
def test_a_nonfinite_entry_spoils_its_own_matrix_only(bad: float, ns_method: str) -> None:
    matrices = gaussian(3, 6, 14)
    matrices[1, 2, 3] = bad

    result = orthogonalize(matrices, ns_method=ns_method)

    assert not torch.isfinite(result[1]).any()
    assert torch.equal(result[[0, 2]], orthogonalize(matrices[[0, 2]], ns_method=ns_method))


def test_it_agrees_with_torchs_own_muon() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = gaussian(20, 50)
    torchs = _zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7)

    # torch iterates in bfloat16: five steps of 2^-8.
    assert error(orthogonalize(matrix), torchs.double()) < 5e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"ns_method": "qr"}, "ns_method='qr' is unknown"), ({"ns_steps": 0}, "ns_steps=0"), ({}, "shape \\(4,\\)")],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    matrix = torch.ones(4) if not arguments else torch.ones(4, 4)

    with pytest.raises(ValueError, match=message):
        orthogonalize(matrix, **arguments)  # type: ignore[arg-type]


def test_the_gram_method_restarts_after_three() -> None:
    # Four steps span the restart and three end on it: both must be the plain iteration's results.
    for ns_steps in (1, 2, 3, 4, 5, 7):
        actual = orthogonalize(gaussian(10, 40), ns_method="gram", ns_steps=ns_steps)
        assert error(actual, reference_orthogonalize(gaussian(10, 40), ns_steps=ns_steps)) < 1e-4
    assert coefficient_schedule("gram", 5) == [QUINTIC] * 5


@pytest.mark.parametrize("magnitude", [1e-300, 1e-50, 1e50, 1e300])
def test_float64_keeps_its_own_range(magnitude: float) -> None:
    matrix = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(orthogonalize(matrix * magnitude), orthogonalize(matrix), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_what_is_no_real_number_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=str(dtype)):
        orthogonalize(torch.ones(2, 3, dtype=dtype))
