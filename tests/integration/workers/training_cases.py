"""What the ranks of a gang run for these tests: real training, returned as plain data."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.telemetry import StepRecord
from workers import checkpoint
from workers.engine import Place, Training, build_training, deepspeed_config
from workers.environment import keep_compiler_unloaded
from workers.final_state import hash_parameters
from workers.train_loop import LoopHooks, Progress, train

keep_compiler_unloaded()


def place() -> Place:
    return Place(dist.get_rank(), dist.get_world_size())


def plain(record: StepRecord) -> dict[str, Any]:
    """A record as a dictionary, without the one field that no two runs share."""
    values = dataclasses.asdict(record)
    values["parameter_norms"] = list(memoryview(record.parameter_norms).cast("f"))
    del values["step_time_s"]
    return values


def attempt(
    spec: RunSpec,
    first_step: int = 0,
    training: Training | None = None,
    save_to: Path | None = None,
    discarded_in_a_row: int = 0,
) -> Any:
    """Train a spec's steps on this rank and say what came of it."""
    training = training or build_training(spec, place())
    records: list[StepRecord] = []
    error: BaseException | None = None

    def after_step(steps: int) -> None:
        every = spec.checkpoint.every_steps
        if save_to is not None and every is not None and steps % every == 0:
            checkpoint.save(training, save_to, steps, progress.discarded_in_a_row)

    progress = Progress(discarded_in_a_row=discarded_in_a_row)
    try:
        train(training, first_step, progress, LoopHooks(records.append, after_step))
    except Exception as caught:
        error = caught
    final = training.initial.compare(training.muon_indices, training.probe_group)
    return {
        "records": [plain(record) for record in records],
        "error": None if error is None else type(error).__name__,
        "error_text": None if error is None else str(error),
        "attempting": progress.step,
        "final": final.model_dump(),
        "final_hash": hash_parameters(training.parameters, is_first=dist.get_rank() == 0),
        "initial_hash": training.initial_parameters_hash,
        "data_hash": training.data_hash,
        "routes": [route.model_dump(mode="json") for route in training.routes],
    }


def run_spec(*, spec: dict[str, Any]) -> Any:
    """Train a whole spec."""
    return attempt(RunSpec.model_validate({"world_size": dist.get_world_size(), **spec}))


def resolved_config(*, spec: dict[str, Any]) -> Any:
    return deepspeed_config(RunSpec.model_validate(spec))


def build_error(*, spec: dict[str, Any]) -> tuple[str, str] | None:
    """Build a spec that may be refused; returns the error's name and text."""
    try:
        build_training(RunSpec.model_validate({"world_size": dist.get_world_size(), **spec}), place())
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def resume(*, spec: dict[str, Any], root: str, break_step: int | None = None) -> Any:
    """Train with checkpoints, then build anew, load the newest and train on; optionally break one file first."""
    full = RunSpec.model_validate({"world_size": dist.get_world_size(), **spec})
    whole = attempt(full, save_to=Path(root))
    if break_step is not None and dist.get_rank() == 0:
        victim = max((Path(root) / f"step-{break_step:08d}").rglob("*.pt"), key=lambda path: path.stat().st_size)
        os.truncate(victim, victim.stat().st_size // 2)
    dist.barrier()
    training = build_training(full, place())
    torch.manual_seed(12345)
    first_step, discarded_in_a_row = checkpoint.load_newest(training, Path(root), full.steps)
    return {
        "whole": whole,
        "resumed": attempt(full, first_step, training, discarded_in_a_row=discarded_in_a_row),
        "first_step": first_step,
    }


def save_on_disks_of_their_own(*, spec: dict[str, Any], root: str) -> tuple[str, str] | None:
    """Write a checkpoint to a folder that is each rank's own; returns the error's name and text."""
    full = RunSpec.model_validate({"world_size": dist.get_world_size(), **spec})
    try:
        checkpoint.save(build_training(full, place()), Path(root) / f"disk-{dist.get_rank()}", 2)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def load_error(*, spec: dict[str, Any], root: str) -> tuple[str, str] | None:
    """Try to resume from a folder that may hold nothing of use."""
    full = RunSpec.model_validate({"world_size": dist.get_world_size(), **spec})
    try:
        checkpoint.load_newest(build_training(full, place()), Path(root), full.steps)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
