"""Orthogonalization on this processor, side by side with the others: `make bench`. Prints.

Every peer runs in turn in one process, round after round, until it has had its repeats or its time: where bfloat16 is
emulated one pass of it takes minutes of a large set. MUON_BENCH_THREADS says how many threads torch takes.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final
from unittest.mock import patch

import deepspeed
import pytest
import torch
from torch import Tensor

from muon_core import large_matrices
from muon_core.muon import orthogonalize_directions_
from muon_core.parameters import MatrixShape
from muon_core.processor import NATIVE_BFLOAT16, cpu_iteration_dtype, processor_flags
from muon_core.reference import reference_orthogonalize
from tests.benchmarks import peers as others
from tests.benchmarks.timing import Timing, record
from tests.benchmarks.workloads import Shape, matrices
from workers.engine import device_name

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

REPEATS: Final = 7
# Of one peer on one set: enough for seven passes of all but emulated bfloat16.
BUDGET_S: Final = 8.0
# Wider sets would take minutes in emulated bfloat16.
WIDEST_EMULATED: Final = int(os.environ.get("MUON_BENCH_WIDEST_EMULATED", "128"))
THREADS: Final = os.environ.get("MUON_BENCH_THREADS")


def layers(count: int, width: int) -> list[Shape]:
    return ([(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]) * count


SETS: Final[dict[str, list[Shape]]] = {
    "12 layers of width 64": layers(12, 64),
    "2 layers of width 128": layers(2, 128),
    "1 layer of width 256": layers(1, 256),
    "1 layer of width 512": layers(1, 512),
    "1 layer of GPT-2 small": layers(1, 768),
}


def ours(dtype: torch.dtype | None, *, one_by_one: bool = True) -> others.Orthogonalize:
    """Our step on copies: the results take the directions' place."""

    def run(given: list[Tensor]) -> list[Tensor]:
        directions = [matrix.clone() for matrix in given]
        shapes = [MatrixShape(1, *matrix.shape) for matrix in given]
        with nullcontext() if one_by_one else patch.object(large_matrices, "SMALLEST_DIMENSION", 1 << 30):
            orthogonalize_directions_(directions, shapes, ns_method="gram", ns_steps=5, iteration_dtype=dtype)
        return directions

    return run


def deepspeeds_standard(given: list[Tensor]) -> list[Tensor]:
    from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5

    return [zeropower_via_newtonschulz5(matrix, steps=5) for matrix in given]


def subjects(shapes: list[Shape]) -> dict[str, others.Orthogonalize]:
    from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

    found = {
        "muon_core": ours(None),
        "muon_core, batches alone": ours(None, one_by_one=False),
        f"DeepSpeed gram, its default, {ns_compute_dtype('gram')}": others.deepspeeds,
    }
    is_native = bool(processor_flags() & NATIVE_BFLOAT16)
    if is_native:
        found |= {"muon_core, float32": ours(torch.float32), "muon_core, bfloat16": ours(torch.bfloat16)}
    if is_native or (min(map(min, shapes)) <= WIDEST_EMULATED):
        found[f"DeepSpeed standard, {ns_compute_dtype('standard')}"] = deepspeeds_standard
        found["torch.optim.Muon, torch.bfloat16"] = others.torchs
    return found


def error(run: others.Orthogonalize, given: list[Tensor], *, is_scaled: bool) -> float:
    """The largest ||result - reference|| / ||reference|| of the first matrix of each shape.

    Args:
        is_scaled: whether the results are Muon's updates, with their aspect scale.
    """
    firsts = list({matrix.shape: matrix for matrix in reversed(given)}.values())
    scales = [MatrixShape(1, *matrix.shape).aspect_scale if is_scaled else 1.0 for matrix in firsts]
    expected = [reference_orthogonalize(matrix) * scale for matrix, scale in zip(firsts, scales, strict=True)]
    pairs = zip(run(firsts), expected, strict=True)
    return max(float((actual.double() - right).norm() / right.norm()) for actual, right in pairs)


def in_turn(runs: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            if sum(times[name]) < BUDGET_S * 1e3:
                begin = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: Timing(tuple(values)) for name, values in times.items()}


@pytest.mark.parametrize("name", list(SETS))
def test_orthogonalize_on_the_cpu(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(int(THREADS or threads))
    try:
        record(
            "processor",
            {
                "name": device_name("cpu"),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "deepspeed": deepspeed.__version__,
                "native bfloat16": ", ".join(sorted(processor_flags() & NATIVE_BFLOAT16)) or "none",
                "muon_core iterates in": str(cpu_iteration_dtype()),
            },
        )
        given = matrices(SETS[name], device="cpu")
        runs = subjects(SETS[name])
        # The first call of each makes what later ones find, and says how it rounds.
        errors = {peer: error(run, given, is_scaled=peer.startswith("muon_core")) for peer, run in runs.items()}
        times = in_turn({peer: lambda run=run: run(given) for peer, run in runs.items()})  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)
    mine = times["muon_core"]
    for peer, timing in times.items():
        rounds = zip(timing.values, mine.values, strict=False)
        row = {
            "ms": timing,
            "repeats": len(timing.values),
            "times muon_core's": round(statistics.median(theirs / our for theirs, our in rounds), 2),
            "error": f"{errors[peer]:.1e}",
        }
        record(f"{name}: {peer}", row)
