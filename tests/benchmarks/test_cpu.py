"""Orthogonalization on the CPU, beside DeepSpeed's default and torch's: `make bench`."""

import statistics
import time

import pytest

from muon_core.zero.cpu import install_cpu_accelerator
from tests.benchmarks.peers import deepspeeds, ours, torchs
from tests.benchmarks.workloads import Shape, matrices

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("default")]

SETS: dict[str, list[Shape]] = {
    "four layers of width 256": ([(256, 256)] * 4 + [(1024, 256), (256, 1024)]) * 4,
    "one layer of width 768": [(768, 768)] * 4 + [(3072, 768), (768, 3072)],
}


@pytest.mark.parametrize("emulates_fp16", [False, True], ids=["stock accelerator", "fp16 emulated"])
@pytest.mark.parametrize("name", list(SETS))
def test_orthogonalize_on_the_cpu(name: str, emulates_fp16: bool) -> None:
    """In turn, so that what else the machine does falls on all alike."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())
    if emulates_fp16:
        install_cpu_accelerator()
    inputs = matrices(SETS[name], "cpu")
    contestants = {"ours": ours, "DeepSpeed 0.19.8": deepspeeds, "torch.optim.Muon": torchs}
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for _ in range(5):
        for contestant, run in contestants.items():
            copies = [matrix.clone() for matrix in inputs]
            begin = time.perf_counter()
            run(copies)
            times[contestant].append((time.perf_counter() - begin) * 1e3)
    for contestant, measured in times.items():
        row = f"{statistics.median(measured):.0f} [{min(measured):.0f}, {max(measured):.0f}] ms"
        print(f"\n{name}, {'fp16 emulated' if emulates_fp16 else 'stock'}: {contestant} {row}", flush=True)
