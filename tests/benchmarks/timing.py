"""Medians and spreads, and the rows that the benchmarks print."""

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{min(self.values):.2f}, {max(self.values):.2f}]"


def record(name: str, row: dict[str, Any]) -> None:
    """Print a row, and append it to the file that MUON_BENCH_FILE names."""
    print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    path = os.environ.get("MUON_BENCH_FILE")
    if path:
        plain = {key: list(value.values) if isinstance(value, Timing) else value for key, value in row.items()}
        with Path(path).open("a") as file:
            file.write(json.dumps({"name": name, **plain}) + "\n")


def time_gpu(run: Callable[[], Any], repeats: int = 20, warmup: int = 3) -> Timing:
    """Time calls by device events, launches included; the cache is what the call before left."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    values = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        values.append(begin.elapsed_time(end))
    return Timing(tuple(values))


def time_graph(run: Callable[[], Any], repeats: int = 20) -> Timing:
    """Time replays of one captured call: what the device needs when the host keeps up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    timing = time_gpu(graph.replay, repeats)
    graph.reset()
    return timing


def extra_memory_mib(run: Callable[[], Any]) -> float:
    """Peak memory that a call allocates beyond what is held before it."""
    run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def kernel_launches(run: Callable[[], Any]) -> int:
    """Kernels, copies and fills that one call puts on the device."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
