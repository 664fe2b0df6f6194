"""Muon on one GPU, side by side with the others: `make bench-gpu`. Prints; asserts only what holds on any GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muon_core
from muon_core.kernels import kernels
from muon_core.kernels.availability import device_has_kernels
from muon_core.muon import nonfinite_flag, orthogonalize_directions_
from muon_core.parameters import MatrixShape
from muon_core.reference import reference_orthogonalize
from tests.benchmarks import peers as others
from tests.benchmarks.timing import extra_memory_mib, kernel_launches, record, time_gpu, time_graph
from tests.benchmarks.workloads import SETS, floor_ms, matrices

pytestmark = [pytest.mark.benchmark, pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

# DeepSpeed and torch take a second and more for one pass over the large sets.
SLOW = {"DeepSpeed 0.19.8", "torch.optim.Muon", "optimuon", "muon-optimizer", "muon-fsdp2", "triton-muon-adamw"}


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    record("device", {"name": torch.cuda.get_device_name(), "torch": torch.__version__})


@pytest.mark.parametrize("name", list(SETS))
def test_orthogonalize(name: str) -> None:
    shapes = SETS[name]
    inputs = matrices(shapes)
    medians = {}
    record(f"orthogonalize {name}", {"floor ms": round(floor_ms(shapes), 2)})
    for peer, run in others.peers().items():
        repeats, warmup = (5, 1) if peer in SLOW and name in ("X", "L") else (20, 3)
        try:
            run(inputs)
        except Exception as error:
            if peer in others.DEPENDENCIES:
                raise
            record(f"orthogonalize {name} {peer}", {"does not run here": f"{type(error).__name__}: {error}"[:200]})
            continue
        timing = time_gpu(lambda run=run: run(inputs), repeats=repeats, warmup=warmup)
        medians[peer] = timing.median
        row: dict[str, Any] = {"ms": timing, "extra MiB": round(extra_memory_mib(lambda run=run: run(inputs)))}
        if peer in ("muon_core", "Dion", "triton-muon-adamw"):
            # What the device needs when the host keeps up.
            row["graph ms"] = time_graph(lambda run=run: run(inputs))
        if name == "M":
            row["launches"] = kernel_launches(lambda run=run: run(inputs))
        record(f"orthogonalize {name} {peer}", row)
    for peer, median in medians.items():
        record(f"orthogonalize {name} ratio", {peer: round(median / medians["muon_core"], 2)})


def spectrum(rows: int, cols: int) -> Tensor:
    """Singular values from 1 to 1e-4."""
    n = min(rows, cols)
    u, _ = torch.linalg.qr(torch.randn(rows, n, device="cuda", dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, n, device="cuda", dtype=torch.float64))
    return ((u * torch.logspace(0, -4, n, device="cuda", dtype=torch.float64)) @ v.mT).float()


@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (1024, 1024), (4096, 1024), (4096, 4096), (11008, 4096)])
def test_rounding_error(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for kind, matrix in (("gaussian", torch.randn(shape, device="cuda")), ("spectrum", spectrum(*shape))):
        expected = reference_orthogonalize(matrix)
        errors = {}
        for mode in ("auto", "off"):
            with kernels(mode):  # type: ignore[arg-type]
                actual = muon_core.orthogonalize(matrix).double()
            errors[mode] = f"{((actual - expected).norm() / expected.norm()).item():.1e}"
        record(f"error {shape} {kind}", errors)


def leaves(shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(matrix) for matrix in matrices(shapes)]
    for parameter, gradient in zip(parameters, matrices(shapes, seed=1), strict=True):
        parameter.grad = gradient
    return parameters


def test_overflow_guard() -> None:
    """(check + momentum update) minus momentum update, on M."""
    shapes = SETS["M"]
    gradients, buffers = matrices(shapes), matrices(shapes, seed=1)

    def move() -> None:
        torch._foreach_lerp_(buffers, gradients, 0.05)

    def check_and_move() -> None:
        nonfinite_flag(gradients)
        torch._foreach_lerp_(buffers, gradients, 0.05)

    for how, measure in (("eager", time_gpu), ("graph", time_graph)):
        alone, guarded = measure(move), measure(check_and_move)
        record(
            f"guard on M, {how}",
            {
                "momentum ms": alone,
                "check and momentum ms": guarded,
                "difference ms": round(guarded.median - alone.median, 3),
                "extra MiB": round(extra_memory_mib(check_and_move) - extra_memory_mib(move), 2),
            },
        )
    from deepspeed.runtime.zero.muon import original_muon  # noqa: F401 -- its muon_update, by its own arithmetic:

    def deepspeeds_guard() -> None:
        for gradient, buffer in zip(gradients, buffers, strict=True):
            is_finite = torch.isfinite(gradient).all()
            buffer.copy_(torch.where(is_finite, buffer.lerp(gradient, 0.05), buffer))

    theirs = time_gpu(deepspeeds_guard)
    record("guard on M, as DeepSpeed's muon_update writes it, not compiled", {"check and momentum ms": theirs})


def test_whole_update() -> None:
    """Gradients and momentum read, momentum and parameters written, on M."""
    shapes = SETS["M"]
    medians = {}
    for name, settings in {
        "muon_core": {},
        "muon_core, skip_nonfinite": {"skip_nonfinite": True},
    }.items():
        optimizer = muon_core.Muon(leaves(shapes), lr=1e-3, **settings)  # type: ignore[arg-type]
        timing = time_gpu(optimizer.step)
        medians[name] = timing.median
        record(
            f"whole update on M {name}",
            {
                "ms": timing,
                "graph ms": time_graph(optimizer.step),
                "extra MiB": round(extra_memory_mib(optimizer.step)),
            },
        )
        del optimizer
    torchs = torch.optim.Muon(leaves(shapes), lr=1e-3)
    record("whole update on M torch.optim.Muon", {"ms": (timing := time_gpu(torchs.step, 10))})
    medians["torch.optim.Muon"] = timing.median
    del torchs
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuon

    deepspeeds = SingleDeviceMuon(leaves(shapes), lr=1e-3)
    record("whole update on M DeepSpeed 0.19.8", {"ms": (timing := time_gpu(deepspeeds.step, 10))})
    medians["DeepSpeed 0.19.8"] = timing.median
    record("whole update on M ratio", {name: round(ms / medians["muon_core"], 2) for name, ms in medians.items()})


def test_kernels_are_what_was_measured() -> None:
    """The counter-test: on a GPU that has them, the numbers above are not those of the library's products."""
    if not device_has_kernels(torch.device("cuda")):
        pytest.skip("this GPU has no kernels")
    matrix = torch.randn(1, 512, 1024, device="cuda")
    direction = matrix.clone()
    orthogonalize_directions_([direction], [MatrixShape(1, 512, 1024)], ns_method="gram", ns_steps=5)
    with kernels("off"):
        library = muon_core.orthogonalize(matrix)
    assert not torch.equal(direction, library)
    torch.testing.assert_close(direction, library, rtol=0, atol=2e-3)
