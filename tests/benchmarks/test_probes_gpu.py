"""What measuring every step costs a GPT-2 medium on one GPU: probes on against off. `make bench-gpu`.

One engine, one process. Windows of a few steps take turns, and the device is waited for between windows only, as
training does: without the probes, with them and the record's append to the spool, and with torch's norms instead of
our pass. A second arm without probes says how far two equal arms lie apart.
"""

import os
import socket
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import muon_core
from muon_core.kernels import kernels
from muon_core.parameters import trainable_parameters
from muon_core.zero.precision import engine_step
from tests.benchmarks.timing import Timing, kernel_launches, record, time_gpu
from workers.probes import Measured, Probes
from workers.spool import Destination, SpoolWriter

pytestmark = [pytest.mark.benchmark, pytest.mark.gpu, pytest.mark.timeout(540), pytest.mark.filterwarnings("default")]

LAYERS, WIDTH, HEADS, VOCABULARY = 24, 1024, 16, 50257
# So many tokens that the device, not the host's launches, sets the step's time: a slow host's spread hides a percent.
SEQUENCE, MICRO_BATCH = 1024, 32
ROUNDS, STEPS_A_WINDOW, WARMUP = 20, 4, 5
TARGET_PERCENT = 1.0


class Block(nn.Module):
    """GPT-2's layer; query, key and value are matrices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        query, key, value = (
            project(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The embedding is the output layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_engine(device: torch.device) -> Any:
    import deepspeed

    torch.manual_seed(0)
    with device:
        model = GPT2()
    optimizer = muon_core.build_optimizer(model, lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        "fp16": {"enabled": True, "initial_scale_power": 10},
        "zero_optimization": {"stage": 1, "reduce_scatter": False},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    muon_core.attach(engine, optimizer)
    return engine


class Loop:
    """The steps of `workers.train_loop`, with the probes to be chosen at each."""

    def __init__(self, engine: Any, spool: SpoolWriter) -> None:
        self.engine, self.spool = engine, spool
        self.step_number = 0
        self.discarded = 0
        self.last: Measured | None = None
        self.host_us: list[float] = []
        """What `measure` and the append took of the host, at each measured step."""
        self.batches = [
            torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), device=engine.device) for _ in range(STEPS_A_WINDOW)
        ]

    def probes(self) -> Probes:
        named = trainable_parameters(self.engine.module)
        routed = self.engine.optimizer.optimizer.routed
        muon = [entry.index for entry in routed if entry.route == "muon"]
        return Probes(self.engine, [parameter for _, parameter in named], muon, None)

    def step(self, probes: Probes | None) -> None:
        started = time.perf_counter()
        tokens = self.batches[self.step_number % len(self.batches)]
        loss = self.engine(tokens[:, :-1], tokens[:, 1:])
        self.engine.backward(loss)
        outcome = engine_step(self.engine)
        self.discarded += outcome.discarded
        if probes is not None:
            begin = time.perf_counter()
            num_tokens = MICRO_BATCH * SEQUENCE
            self.last = Measured(self.step_number, outcome, loss.detach().double(), begin - started, num_tokens)
            before = probes.measure(self.last)
            if before is not None:
                self.spool.append(before)
            self.host_us.append((time.perf_counter() - begin) * 1e6)
        self.step_number += 1

    def window(self, probes: Probes | None) -> float:
        """Milliseconds a step, over a window."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS_A_WINDOW):
            self.step(probes)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / STEPS_A_WINDOW


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    import deepspeed

    record("device", {"name": torch.cuda.get_device_name(), "torch": torch.__version__})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()})
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    spool = SpoolWriter(
        tmp_path_factory.mktemp("probes") / "spool", Destination("http://127.0.0.1:9", "run-0-a1", "token", 0)
    )
    loop = Loop(build_engine(torch.device("cuda", torch.cuda.current_device())), spool)
    yield loop
    spool.close()
    loop.engine.destroy()
    torch.distributed.destroy_process_group()


def percent(arm: Timing, control: Timing) -> float:
    """By how much an arm's windows are longer than the control's of the same round: the median over the rounds."""
    ratios = (mine / other for mine, other in zip(arm.values, control.values, strict=True))
    return (statistics.median(ratios) - 1.0) * 100.0


def test_probes_on_against_off(loop: Loop) -> None:
    with kernels("off"):
        torchs = loop.probes()
        loop.step(torchs)
    ours = loop.probes()
    for _ in range(WARMUP):
        loop.step(ours)
    loop.host_us.clear()
    arms: dict[str, Probes | None] = {"off": None, "on": ours, "on, torch's norms": torchs, "off again": None}
    times: dict[str, list[float]] = {name: [] for name in arms}
    host_us: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(ROUNDS):
        names = list(arms)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            loop.host_us.clear()
            times[name].append(loop.window(arms[name]))
            host_us[name] += loop.host_us
    assert loop.discarded == 0
    assert loop.spool.records > 2 * ROUNDS * (STEPS_A_WINDOW - 1)
    parameters = trainable_parameters(loop.engine.module)
    record(
        "a GPT-2 medium step, ZeRO stage 1, fp16",
        {
            "parameters": len(parameters),
            "elements": sum(parameter.numel() for _, parameter in parameters),
            "tokens": MICRO_BATCH * SEQUENCE,
            "steps an arm": ROUNDS * STEPS_A_WINDOW,
        },
    )
    found = {name: Timing(tuple(values)) for name, values in times.items()}
    for name, timing in found.items():
        row: dict[str, Any] = {"ms a step": timing, "longer than off, %": round(percent(timing, found["off"]), 2)}
        if arms[name] is not None:
            row["host us in measure and append, median"] = round(statistics.median(host_us[name]))
        if name == "on":
            row["target, %"] = TARGET_PERCENT
        record(f"probes {name}", row)


def test_what_measuring_puts_on_the_device(loop: Loop) -> None:
    norms: dict[str, array[float]] = {}
    ways: dict[str, Callable[[], Any]] = {"our pass": nullcontext, "torch's norms": lambda: kernels("off")}
    for name, way in ways.items():
        with way():
            probes = loop.probes()
            if loop.last is None:
                for _ in range(WARMUP):
                    loop.step(probes)
            last = loop.last
            assert last is not None
            probes.measure(last)

            def again(probes: Probes = probes, last: Measured = last) -> None:
                probes.measure(last)

            record(
                f"one measurement alone, {name}",
                {"ms": time_gpu(again), "launches and copies": kernel_launches(again)},
            )
            found = probes.flush()
        assert found is not None
        norms[name] = array("f", found.parameter_norms)
    assert any(norms["our pass"])
    # Float64 sums in another order: float32 values at most a rounding apart.
    torch.testing.assert_close(
        torch.tensor(norms["our pass"]), torch.tensor(norms["torch's norms"]), rtol=2e-7, atol=0.0
    )
