"""Training loops of somebody's own, with or without `muonscope.record` around them, as each rank runs them."""

import io
import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from typing import Any

import deepspeed
import torch

import muon_core
import muonscope
from muon_core.errors import UnsupportedSetup
from workers import recorder
from workers.final_state import hash_parameters

STEPS = 6


def build_engine(optimizer: str, stage: int, minimum: int = 1, adam_lr: float = 1e-3) -> Any:
    """`optimizer` is muon (DeepSpeed's own), adam, attached or unattached; at 2^20 the first steps overflow."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "min_loss_scale": minimum},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer == "muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": adam_lr, "torch_adam": True}}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if optimizer == "adam":
        adam = torch.optim.AdamW(model.parameters(), lr=adam_lr)
        return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]
    ours = muon_core.build_optimizer(model, lr=0.02, adam={"lr": adam_lr})
    engine = deepspeed.initialize(model=model, optimizer=ours, config=config)[0]
    if optimizer != "unattached":
        muon_core.attach(engine, ours)
    return engine


def take_steps(engine: Any, ends: str | None = None) -> None:
    """Six steps of two micro-batches; `ends` says what the fourth one is followed by."""
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for step in range(STEPS):
        for _ in range(2):
            inputs = torch.randn(4, 16, generator=generator).half().to(engine.device)
            loss = torch.nn.functional.mse_loss(engine(inputs).float(), inputs.float() * 10)
            engine.backward(loss)
            engine.step()
        if step == 3 and ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and ends == "raises":
            raise ZeroDivisionError("of the script's own making")


def loop(
    *,
    optimizer: str,
    stage: int,
    ends: str | None = None,
    record: dict[str, Any] | None = None,
    adam_lr: float = 1e-3,
) -> Any:
    """Train, and say which run recorded it, what the weights are, and what ended it."""
    engine = build_engine(optimizer, stage, minimum=2**20 if ends == "exhausted" else 1, adam_lr=adam_lr)
    error = None
    recording = nullcontext() if record is None else muonscope.record(engine, name="mine", **record)
    try:
        with recording as recorded:
            take_steps(engine, ends)
    except Exception as caught:
        error = type(caught).__name__
    parameters = list(engine.module.parameters())
    return {
        "run_id": recorded.run_id if recorded is not None else None,
        "hash": hash_parameters(parameters, is_first=True),
        "error": error,
        "left_as_found": not {"step", "backward"} & vars(engine).keys(),
    }


def slow_at_first(*, record: dict[str, Any], after_s: float, is_told: bool) -> tuple[str, str]:
    """Record a loop whose micro-batches take a twentieth of a second; returns the weights' hash, and what was said.

    Where it is to be told of, rank 0's first one takes until it is.
    """
    engine = build_engine("muon", 1)
    backward, said = engine.backward, io.StringIO()

    awaited = time.monotonic() + 60 if is_told and torch.distributed.get_rank() == 0 else 0.0

    def slow_backward(loss: torch.Tensor) -> Any:
        time.sleep(0.05)
        while not said.getvalue() and time.monotonic() < awaited:
            time.sleep(0.01)
        return backward(loss)

    engine.backward = slow_backward
    usual, recorder.AFTER_S = recorder.AFTER_S, after_s  # type: ignore[misc]
    try:
        with redirect_stderr(said), muonscope.record(engine, name="mine", **record):
            take_steps(engine)
    finally:
        recorder.AFTER_S = usual  # type: ignore[misc]
    return hash_parameters(list(engine.module.parameters()), is_first=True), said.getvalue()


def script(*, text: str, url: str, folder: str, arguments: tuple[str, ...] = ()) -> str:
    """Run a whole script as this rank, in a folder of its own; returns what it printed."""
    environment = dict(os.environ)
    os.environ["MUONSCOPE_URL"] = url
    argv, sys.argv = sys.argv, ["script.py", *arguments]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), chdir(folder):
            exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = argv
        # Accelerate passes what it was told on to itself by variables.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        if (state := sys.modules.get("accelerate.state")) is not None:
            # One a process: the next script's would be this one's.
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()
    return printed.getvalue()


def unholdable(*, record: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Record an engine whose weight decay no spec can hold; returns the run's id and what the recorder warned of."""
    engine = build_engine("adam", 1)
    engine.optimizer.param_groups[0]["weight_decay"] = -0.5
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("workers.recorder")
    logger.addHandler(handler)
    try:
        with muonscope.record(engine, name="mine", **record) as recorded:
            take_steps(engine)
    finally:
        logger.removeHandler(handler)
    return recorded.run_id, said


def refused(
    *, record: dict[str, Any], temporary: str | None = None, optimizer: str = "muon"
) -> tuple[str, str, str | None]:
    """Try to record where that must fail; returns the error's name, text and remedy."""
    engine = build_engine(optimizer, 1)
    usual, tempfile.tempdir = tempfile.tempdir, temporary or tempfile.tempdir
    try:
        with muonscope.record(engine, name="mine", **record):
            raise AssertionError("the block was entered")
    except (muonscope.MuonscopeError, UnsupportedSetup) as error:
        return type(error).__name__, str(error), error.remedy
    finally:
        tempfile.tempdir = usual


class Named(torch.nn.Module):
    """Trainable parameters of given names and shapes; each has a share in the loss."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.rand(shape), requires_grad=name not in frozen))

    def forward(self) -> torch.Tensor:
        return sum((each.float() ** 2).mean() for each in self.parameters())  # type: ignore[return-value]


def named(*, shapes: dict[str, tuple[int, ...]], frozen: tuple[str, ...] = (), record: dict[str, Any]) -> str | None:
    """Train a model of named parameters with DeepSpeed's own Muon for three steps; returns the run's id."""
    torch.manual_seed(0)
    model = Named(shapes, frozen)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_scatter": False},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    with muonscope.record(engine, name="named", **record) as recorded:
        for _ in range(3):
            engine.backward(engine())
            engine.step()
    return recorded.run_id
