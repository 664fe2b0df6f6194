"""One rank of the whole-step measurement: three engines in one process, stepped in turn.

Started by `test_two_gpus`, once a GPU:

    python -m tests.benchmarks.zero_ranks --rank 0 --port 29501 --stages 1,2,3 --out rows.jsonl
"""

import argparse
import gc
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, TOKENS = 1024, 24, 512
REPEATS, WARMUP = 20, 3


class Layer(nn.Module):
    """The six matrices of a GPT-2 medium layer, without attention between tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.query(x) + self.key(x) + self.value(x))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.005)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def config(stage: int, gas: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
    }


def build(kind: str, stage: int, gas: int) -> tuple[Any, Any]:
    """An engine, and the optimizer of ours that it runs, if any."""
    import deepspeed

    import muon_core

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model()
    settings, ours, theirs = config(stage, gas), None, None
    if kind == "AdamW":
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    elif kind == "stock":
        for parameter in model.parameters():
            parameter.use_muon = True
        settings["optimizer"] = {
            "type": "Muon",
            "params": {"lr": 1e-4, "momentum": 0.95, "ns_method": "gram", "torch_adam": True},
        }
    else:
        wire = torch.float16 if kind.endswith("float16 wire") else None
        ours = theirs = muon_core.build_optimizer(model, lr=1e-4, wire_dtype=wire)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=theirs, model_parameters=list(model.parameters()), config=settings
    )
    if ours is not None:
        muon_core.attach(engine, ours)
    return engine, ours


class Subject:
    """One engine under measurement."""

    def __init__(self, kind: str, stage: int, gas: int) -> None:
        torch.cuda.synchronize()
        self.held_before = torch.cuda.memory_allocated()
        self.kind, self.gas = kind, gas
        self.engine, self.ours = build(kind, stage, gas)
        self.times: list[float] = []
        self.held = self.peak = 0

    def step(self, x: Tensor, *, timed: bool) -> None:
        """One optimizer step; the clock runs from the boundary's backward pass to the end of its step."""
        others = torch.cuda.memory_allocated() - self.held
        for micro_batch in range(self.gas):
            loss = self.engine(x)
            is_boundary = micro_batch + 1 == self.gas
            if is_boundary:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                begin = time.perf_counter()
            self.engine.backward(loss)
            self.engine.step()
        torch.cuda.synchronize()
        if timed:
            self.times.append((time.perf_counter() - begin) * 1e3)
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)

    def settle(self, x: Tensor) -> None:
        """Take the first steps, which make state and scratch, and note what the engine then holds."""
        for _ in range(WARMUP):
            self.step(x, timed=False)
        self.held = torch.cuda.memory_allocated() - self.held_before

    def close(self) -> None:
        self.engine.destroy()
        self.engine = self.ours = None
        gc.collect()
        torch.cuda.empty_cache()


def measure(stage: int, gas: int, kinds: list[str], world: int, repeats: int) -> Iterator[dict[str, Any]]:
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.float16)
    subjects = []
    for kind in kinds:
        subjects.append(Subject(kind, stage, gas))
        subjects[-1].settle(x)
    for _ in range(repeats):
        for subject in subjects:
            subject.step(x, timed=True)
    for subject in subjects:
        row: dict[str, Any] = {
            "stage": stage,
            "gas": gas,
            "kind": subject.kind,
            "median_ms": round(statistics.median(subject.times), 1),
            "low_ms": round(min(subject.times), 1),
            "high_ms": round(max(subject.times), 1),
            "held_mib": round(subject.held / 2**20),
            "peak_mib": round(subject.peak / 2**20),
            "times_ms": [round(ms, 2) for ms in subject.times],
        }
        if subject.ours is not None:
            before = subject.ours.exchange.elements_sent
            subject.step(x, timed=False)
            total = sum(p.numel for part in subject.ours.partitions.partitions for p in part.parameters)
            row["elements_sent"] = subject.ours.exchange.elements_sent - before
            row["limit"] = 2 * (world - 1) * total // world**2
            row["momentum_mib"] = round(
                sum(s["momentum_buffer"].numel() * 4 for s in subject.ours.state.values()) / 2**20
            )
        yield row
    for subject in subjects:
        subject.close()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rank", type=int)
    arguments.add_argument("--world", type=int, default=2)
    arguments.add_argument("--port", type=int)
    arguments.add_argument("--stages", default="1,2,3")
    arguments.add_argument("--gas", default="1,4")
    arguments.add_argument("--repeats", type=int, default=REPEATS)
    arguments.add_argument("--kinds", default="AdamW,stock,ours")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    os.environ.update(
        RANK=str(given.rank),
        LOCAL_RANK=str(given.rank),
        WORLD_SIZE=str(given.world),
        LOCAL_SIZE=str(given.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(given.port),
        DEEPSPEED_LOG_LEVEL="error",
    )
    torch.cuda.set_device(given.rank)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    for gas in map(int, given.gas.split(",")):
        for stage in map(int, given.stages.split(",")):
            for row in measure(stage, gas, given.kinds.split(","), given.world, given.repeats):
                write(given.rank, given.out, row)
    torch.distributed.destroy_process_group()


def write(rank: int, path: Path, row: dict[str, Any]) -> None:
    """Every rank's rows go to the file; the first rank's are printed."""
    with path.open("a") as file:
        file.write(json.dumps({"rank": rank, **row}) + "\n")
    if rank == 0:
        print({key: value for key, value in row.items() if key != "times_ms"}, flush=True)


if __name__ == "__main__":
    main()
