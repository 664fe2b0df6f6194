"""The kernels on a GPU that has them: `pytest -m gpu tests/unit/muon_core`."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from muon_core import Muon, orthogonalize
from muon_core.kernels import kernels
from muon_core.kernels.availability import device_has_kernels
from muon_core.muon import (
    apply_measured_update_,
    blend_momentum_,
    nonfinite_flag,
    orthogonalize_directions_,
)
from muon_core.newton_schulz import NS_METHODS
from muon_core.parameters import MatrixShape
from muon_core.reference import reference_orthogonalize

pytestmark = pytest.mark.gpu

if torch.cuda.is_available() and device_has_kernels(torch.device("cuda")):
    from muon_core.kernels.products import symmetric_product
    from muon_core.kernels.tuning import CANDIDATES
else:
    CANDIDATES = ()  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if not torch.cuda.is_available() or not device_has_kernels(torch.device("cuda")):
        pytest.skip("needs a GPU of compute capability 9, and triton")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n_size", [64, 384, 400, 776])
def test_a_product_is_symmetric_and_right_for_every_tile_size(config: object, transposed: bool, n_size: int) -> None:
    operand = gaussian(3, *((200, n_size) if transposed else (n_size, 200))).half()
    c = gaussian(3, n_size, n_size).half()
    c = c.tril() + c.tril(-1).mT
    out = torch.full((3, n_size, n_size), float("nan"), device="cuda", dtype=torch.float16)

    symmetric_product(operand, operand, out, alpha=0.5, c=c, beta=0.25, gamma=3.0, transposed=transposed, config=config)

    x = operand.double().mT if transposed else operand.double()
    expected = 0.5 * x @ x.mT + 0.25 * c.double() + 3.0 * torch.eye(n_size, device="cuda", dtype=torch.float64)
    assert torch.equal(out, out.mT)
    # One rounding to float16.
    assert error(out, expected) < 4e-4


@pytest.mark.parametrize("ns_method", NS_METHODS)
@pytest.mark.parametrize("shape", [(256, 256), (256, 1024), (1024, 256), (320, 400), (3, 264, 512), (768, 768)])
def test_kernels_on_and_off_agree_and_both_with_float64(shape: tuple[int, ...], ns_method: str) -> None:
    matrix = gaussian(*shape)
    expected = reference_orthogonalize(matrix, ns_method=ns_method) if len(shape) == 2 else None

    on = orthogonalize(matrix, ns_method=ns_method)
    with kernels("off"):
        off = orthogonalize(matrix, ns_method=ns_method)

    # The counter-check: the two really took different ways.
    assert not torch.equal(on, off)
    # About ten float16 roundings of 2^-11 in each of five steps, on either side.
    assert error(on, off.double()) < 8e-3
    if expected is not None:
        assert error(on, expected) < 5e-3


def test_a_list_of_every_shape_gives_what_each_gives_alone() -> None:
    shapes = [
        MatrixShape(1, 512, 256),
        MatrixShape(1, 256, 512),
        MatrixShape(4, 256, 256),
        MatrixShape(1, 768, 512, (512, 256)),
        MatrixShape(1, 20, 30),
        MatrixShape(1, 300, 513),
    ]
    directions = [gaussian(shape.numel, seed=i) for i, shape in enumerate(shapes)]
    alone = []
    for direction, shape in zip(directions, shapes, strict=True):
        blocks = direction.split([block.numel for block in shape.blocks])
        alone.append(
            torch.cat(
                [
                    block.aspect_scale * orthogonalize(piece.view(block.batch, block.rows, block.cols)).flatten()
                    for piece, block in zip(blocks, shape.blocks, strict=True)
                ]
            )
        )

    orthogonalize_directions_(directions, shapes, ns_method="gram", ns_steps=5)

    for together, single in zip(directions, alone, strict=True):
        # torch's batched products may round differently in another batch.
        assert error(together, single.double()) < 5e-3


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 2.0**40, 1e30])
def test_extreme_inputs_give_what_one_gives(magnitude: float) -> None:
    matrix = gaussian(256, 512)

    torch.testing.assert_close(orthogonalize(matrix * magnitude), orthogonalize(matrix), rtol=0, atol=2e-3)


def test_zero_stays_zero_and_a_nonfinite_entry_spoils_its_own_matrix_only() -> None:
    matrices = gaussian(4, 256, 512)
    matrices[1] = 0
    matrices[2, 100, 17] = float("inf")

    result = orthogonalize(matrices)

    assert not result[1].any()
    assert torch.isnan(result[2]).all()
    assert torch.isfinite(result[[0, 3]]).all()


def leaf(*shape: int, seed: int = 0) -> nn.Parameter:
    parameter = nn.Parameter(gaussian(*shape, seed=seed))
    parameter.grad = gaussian(*shape, seed=seed + 100)
    return parameter


@pytest.mark.parametrize("momentum", [0.95, 0.3])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_fused_step_moves_momentum_to_the_last_bit_as_torch_does(momentum: float, nesterov: bool) -> None:
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1, "nesterov": nesterov}
    fused, plain = leaf(256, 512), leaf(256, 512)
    optimizers = Muon([fused], **settings), Muon([plain], **settings)  # type: ignore[arg-type]

    for _ in range(3):
        optimizers[0].step()
        with kernels("off"):
            optimizers[1].step()

    buffers = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (fused, plain), strict=True)]
    assert torch.equal(*buffers)
    # Three updates of size lr, each with the difference of two ways to round.
    torch.testing.assert_close(fused, plain, rtol=0, atol=3 * 0.1 * 5e-3)


@pytest.mark.parametrize("momentum", [0.95, 0.3])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("size", [5, 100_003])
def test_a_shards_blend_and_update_equal_torchs_to_the_last_bit(momentum: float, nesterov: bool, size: int) -> None:
    shards = [[gaussian(size, seed=seed) for seed in range(3)] for _ in range(2)]
    norms = []
    for mode, (gradient, buffer, weight) in zip(("auto", "off"), shards, strict=True):
        with kernels(mode):  # type: ignore[arg-type]
            blend_momentum_(gradient, buffer, momentum=momentum, nesterov=nesterov)
            norms.append(apply_measured_update_(weight, gradient, lr=0.3, weight_decay=0.1))

    assert all(map(torch.equal, *shards))
    # Sums of 1e5 squares in another order.
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_with_a_nonfinite_gradient_writes_nothing_and_asks_the_host_nothing(bad: float) -> None:
    big, small, vector = leaf(256, 512), leaf(8, 9, seed=1), nn.Parameter(gaussian(40))
    vector.grad = gaussian(40, seed=7)
    groups = [{"params": [big, small]}, {"params": [vector], "route": "adamw"}]
    optimizer = Muon(groups, lr=0.1, skip_nonfinite=True)
    optimizer.step()
    everything = lambda: [  # noqa: E731
        t.clone() for p in (big, small, vector) for t in (p.detach(), *optimizer.state[p].values())
    ]
    before = everything()
    assert big.grad is not None
    kept = big.grad[3, 5].clone()

    big.grad[3, 5] = bad
    with warnings.catch_warnings():
        # torch says that the mode may miss some.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    held = everything()
    big.grad[3, 5] = kept
    optimizer.step()

    assert all(map(torch.equal, held, before))
    # The counter-test: a step that never writes would pass the line above.
    assert not any(map(torch.equal, everything(), before))


def test_a_scaler_that_skips_a_step_leaves_the_momentum_unchanged() -> None:
    weight = nn.Parameter(gaussian(256, 512))
    optimizer = Muon([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000)

    def step(factor: float) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        scaler.scale((weight * gaussian(256, 512, seed=3) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return optimizer.state[weight]["momentum_buffer"].clone(), weight.detach().clone()

    first, discarded, applied = step(1.0), step(float("inf")), step(1.0)

    assert torch.equal(discarded[0], first[0])
    assert torch.equal(discarded[1], first[1])
    assert not torch.equal(applied[0], first[0])
    # Unscaled units: the first momentum is a twentieth of the gradient.
    torch.testing.assert_close(first[0], 0.05 * gaussian(256, 512, seed=3), rtol=1e-6, atol=0)


def test_a_captured_step_equals_the_eager_one_and_reads_its_learning_rate() -> None:
    eager, captured = leaf(256, 512), leaf(256, 512)
    rate = torch.tensor(0.1, device="cuda")
    optimizers = Muon([eager], lr=0.1, skip_nonfinite=True), Muon([captured], lr=rate, skip_nonfinite=True)
    for optimizer in optimizers:
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()

    graph.replay()
    optimizers[0].step()
    rate.fill_(0.05)
    optimizers[0].param_groups[0]["lr"] = 0.05
    graph.replay()
    optimizers[0].step()

    torch.testing.assert_close(captured, eager, rtol=0, atol=1e-6)
    buffers = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (eager, captured), strict=True)]
    assert torch.equal(*buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_the_flag_finds_one_bad_element_in_any_tensor_and_none_in_good_ones(dtype: torch.dtype, bad: float) -> None:
    tensors = [gaussian(1000, 37).to(dtype), gaussian(5).to(dtype), gaussian(64, 64).to(dtype)]
    assert nonfinite_flag(tensors).item() == 0.0  # type: ignore[union-attr]

    for tensor in tensors:
        kept = tensor.view(-1)[-1].clone()
        tensor.view(-1)[-1] = bad
        assert nonfinite_flag(tensors).item() == 1.0  # type: ignore[union-attr]
        tensor.view(-1)[-1] = kept
