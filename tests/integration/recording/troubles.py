"""Loops of somebody's own whose surroundings go wrong, as each rank runs them."""

import os
import signal
from typing import Any

import muonscope
from tests.integration.recording.loops import build_engine, take_steps


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
