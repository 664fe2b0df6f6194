"""Loops of somebody's own whose surroundings go wrong, as each rank runs them."""

import errno
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import muonscope
from tests.integration.recording.loops import build_engine, take_steps
from workers import shipper, spool
from workers.final_state import hash_parameters


def stood_in_for(*, record: dict[str, Any]) -> tuple[bool, int]:
    """Record an engine whose `step` is somebody's own; returns whether it still is, and how often it was called."""
    engine, calls = build_engine("adam", 1), []
    step = engine.step

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return step(*args, **options)

    engine.step = counted
    with muonscope.record(engine, name="stood in for", **record):
        take_steps(engine)
    return vars(engine).get("step") is counted, len(calls)


def with_a_forked_child(*, record: dict[str, Any]) -> str | None:
    """Record a loop that forks a process which outlives it, as data loaders do; returns the run's id."""
    engine = build_engine("adam", 1)
    with muonscope.record(engine, name="forks", **record) as recorded:
        child = os.fork()
        if not child:
            signal.pause()
        take_steps(engine)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return recorded.run_id


def on_a_full_disk(*, steps: int, record: dict[str, Any]) -> dict[str, Any]:
    """Record a loop whose disk takes no more after `steps` of its steps; returns what became of both."""
    engine, error, write = build_engine("adam", 1), None, os.write
    appended = []

    def limited(descriptor: int, data: bytes) -> int:
        appended.append(1)
        if len(appended) > steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    recording = muonscope.record(engine, name="full", **record)
    try:
        with recording:
            spool.os.write = limited  # type: ignore[attr-defined]
            take_steps(engine)
    except Exception as caught:
        error = type(caught).__name__
    finally:
        spool.os.write = write  # type: ignore[attr-defined]
    weights = hash_parameters(list(engine.module.parameters()), is_first=True)
    return {"run_id": recording.run_id, "error": error, "hash": weights}


def one_leaves_alone(*, rank: int, record: dict[str, Any]) -> tuple[str | None, str | None]:
    """Record a loop that one rank leaves by an error after its last step; returns the error and the run's id."""
    engine, error = build_engine("adam", 1), None
    recording = muonscope.record(engine, name="alone", **record)
    try:
        with recording:
            take_steps(engine)
            if torch.distributed.get_rank() == rank:
                raise ZeroDivisionError("of this rank alone")
    except Exception as caught:
        error = type(caught).__name__
    return error, recording.run_id


def without_a_keeper(*, record: dict[str, Any], temporary: str) -> tuple[str, list[str]]:
    """Try to record where no process can be started; returns the error, and the spools that are left.

    They are kept below `temporary`, where nobody else keeps any.
    """
    engine, start = build_engine("adam", 1), shipper.start_detached

    def refuse(directory: Path, module: str = "") -> None:
        raise subprocess.TimeoutExpired(module, 30)

    usual, tempfile.tempdir = tempfile.tempdir, temporary
    shipper.start_detached = refuse
    try:
        with muonscope.record(engine, name="no keeper", **record):
            raise AssertionError("the block was entered")
    except subprocess.TimeoutExpired as error:
        return type(error).__name__, [path.name for path in spool.spool_directory("any").parent.iterdir()]
    finally:
        tempfile.tempdir = usual
        shipper.start_detached = start
