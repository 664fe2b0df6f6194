"""Large matrices on the CPU: symmetric products by halves, one matrix at a time, in buffers used again."""

import pytest
import torch
from torch import Tensor

from muon_core import large_matrices, orthogonalize
from muon_core.large_matrices import SMALLEST_DIMENSION, symmetric_product_
from muon_core.muon import orthogonalize_directions_
from muon_core.newton_schulz import NS_METHODS
from muon_core.parameters import MatrixShape
from muon_core.reference import reference_orthogonalize

# As small as halving still happens twice: what holds here holds for any size, and is quicker seen.
N = 260
SHAPES = [(N, N), (N, N + 40), (N, 2 * N), (2 * N + 1, N)]


@pytest.fixture(autouse=True)
def _large_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SMALLEST_DIMENSION > N
    monkeypatch.setattr(large_matrices, "SMALLEST_DIMENSION", N)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rows: int, cols: int) -> Tensor:
    """Four large singular values above noise of a thousandth: where a Gram matrix loses most."""
    return gaussian(rows, 4, seed=3) @ gaussian(4, cols, seed=4) + 1e-3 * gaussian(rows, cols, seed=5)


def in_float32(matrix: Tensor, ns_method: str = "gram") -> Tensor:
    return orthogonalize(matrix, ns_method=ns_method, iteration_dtype=torch.float32)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 300, 515])
def test_a_symmetric_product_is_right_and_mirrored(n: int) -> None:
    # Two polynomials of one symmetric matrix, as in the iteration: their product is symmetric.
    root = gaussian(n, n) / n
    a = root @ root.mT
    b = a @ a
    c, out = a.clone(), torch.full((n, n), float("nan"))

    symmetric_product_(a, b, out, alpha=0.5, c=c, beta=0.25)

    expected = 0.5 * a.double() @ b.double() + 0.25 * c.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    half = (n + 1) // 2
    if n > 128:
        assert torch.equal(out[:half, half:], out[half:, :half].mT)


def test_the_default_dtype_of_the_callers_script_changes_no_bit() -> None:
    matrix = gaussian(N, N + 40)
    expected = in_float32(matrix)

    torch.set_default_dtype(torch.bfloat16)
    try:
        result = in_float32(matrix)
    finally:
        torch.set_default_dtype(torch.float32)

    assert torch.equal(result, expected)


@pytest.mark.parametrize("ns_method", NS_METHODS)
@pytest.mark.parametrize("make", [gaussian, low_rank])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_matrices_equal_the_float64_reference(shape: tuple[int, int], make: object, ns_method: str) -> None:
    matrix = make(*shape)  # type: ignore[operator]
    expected = reference_orthogonalize(matrix, ns_method=ns_method)

    actual = in_float32(matrix, ns_method).double()

    # As for small ones: rounding of 6e-8, magnified by at most 3.4445^5 = 485 where a singular value is small.
    assert ((actual - expected).norm() / expected.norm()).item() < 3e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_matrix_takes_another_way_than_a_small_one(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = gaussian(*shape)
    large = in_float32(matrix)
    monkeypatch.setattr(large_matrices, "SMALLEST_DIMENSION", N + 1)

    small = in_float32(matrix)

    assert not torch.equal(large, small)
    # Float32 rounding on either side.
    assert ((large - small).norm() / small.norm()).item() < 1e-4


def test_the_others_change_no_bit_of_a_matrix() -> None:
    shapes = [(N, N), (N, 2 * N), (N, N), (2 * N, N)]
    alone = [in_float32(gaussian(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    directions = [gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    orthogonalize_directions_(
        directions,
        [MatrixShape(1, *shape) for shape in shapes],
        ns_method="gram",
        ns_steps=5,
        iteration_dtype=torch.float32,
    )

    assert all(torch.equal(a, b) for a, b in zip(directions[:3], alone[:3], strict=True))
    assert torch.equal(directions[3], alone[3] * 2**0.5)


def test_where_a_matrix_lies_changes_no_bit() -> None:
    matrix = gaussian(N, N)
    shifted = torch.empty(N * N + 1)[1:].view(N, N).copy_(matrix)

    assert torch.equal(in_float32(shifted), in_float32(matrix))


@pytest.mark.parametrize("exponent", [-99, 99])
def test_powers_of_two_change_no_bit(exponent: int) -> None:
    matrix = gaussian(N, N).clamp(min=0.01)

    assert torch.equal(in_float32(matrix * 2.0**exponent), in_float32(matrix))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_nonfinite_entry_spoils_its_own_matrix_only(bad: float) -> None:
    matrices = gaussian(3, N, N)
    matrices[1, 2, 3] = bad

    result = in_float32(matrices)

    assert not torch.isfinite(result[1]).any()
    assert torch.equal(result[[0, 2]], in_float32(matrices[[0, 2]]))


def test_zero_stays_zero_and_the_callers_tensor_is_untouched() -> None:
    zero, matrix = torch.zeros(N, N), gaussian(N, N)
    before = matrix.clone()

    in_float32(matrix)

    assert torch.equal(in_float32(zero), zero)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_iterated_in_float32_and_keep_their_own(dtype: torch.dtype) -> None:
    matrix = gaussian(N, N).to(dtype)

    result = in_float32(matrix)

    assert result.dtype == dtype
    # What the caller's dtype rounds at the end.
    torch.testing.assert_close(result.float(), in_float32(matrix.float()), rtol=0, atol=1e-3)
