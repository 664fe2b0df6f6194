"""Ranks as real processes: spawned once, given many cases, ended hard when they hang.

    gang = Gang(world_size=2)
    results = gang.run(case, key=value)      # case(**kwargs) on every rank; results by rank

A case is a module-level function, so that it can be named to the ranks; what it returns must pickle. A failure says
which rank raised what, and which ranks were still silent. This module imports no torch.

On the CPU ranks are forked from a server that has imported torch and DeepSpeed once for all of them; GPUs need ranks
that start from nothing.
"""

import multiprocessing as mp
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.ports import hold_port, number_of

# One rank has raised: its peers get this long to say something too, before they are ended.
GRACE_S = 5.0
START_LIMIT_S = 240.0
# For what hangs: a case takes seconds, and many times that on a machine that does much else.
CASE_LIMIT_S = 200.0
# What the server imports before it forks the first rank.
PRELOADED = ["tests.distributed.scenario"]
# `fork`, for a parent that has imported all of it itself.
START_METHOD_VARIABLE = "MUON_CORE_TEST_START_METHOD"
DEFAULTS = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}


class GangFailure(AssertionError):
    """A case failed; the message has one paragraph a rank."""


class Gang:
    """`world_size` ranks of one process group, alive until `close`."""

    def __init__(self, world_size: int, *, trains: bool = True) -> None:
        """Args: `trains` off gives bare processes, without torch, DeepSpeed or a process group."""
        self.world_size = world_size
        self._trains = trains
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._results: dict[tuple[str, str], list[Any]] = {}

    def run(self, case: Callable[..., Any], *, timeout_s: float = CASE_LIMIT_S, **arguments: Any) -> list[Any]:
        """Run a case on every rank and return what each returned, by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers = self._collect(timeout_s)
        if any(kind != "returned" for kind, _ in answers):
            self.close()
            paragraphs = [f"--- rank {rank} {kind}\n{detail}" for rank, (kind, detail) in enumerate(answers)]
            raise GangFailure(f"{case.__name__}({arguments}) at world size {self.world_size}\n" + "\n".join(paragraphs))
        return [pickle.loads(detail) for _, detail in answers]

    def run_once(self, case: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Like `run`, but give an earlier run's results when the arguments are the same: training is deterministic.

        Not for a test of determinism itself.
        """
        key = (case.__qualname__, repr(sorted(arguments.items())))
        if key not in self._results:
            self._results[key] = self.run(case, **arguments)
        return self._results[key]

    def close(self) -> None:
        """End every rank at once. Gloo sometimes aborts at a normal exit, so none is waited for."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(60)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = _context()
        # Held until all have met there.
        with hold_port() as held, _environment({**DEFAULTS, "OMP_NUM_THREADS": "1"}):
            port = number_of(held) if self._trains else None
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, self.world_size, port), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            answers = self._collect(START_LIMIT_S)
        if any(kind != "returned" for kind, _ in answers):
            self.close()
            raise GangFailure(f"the ranks did not start: {answers}")

    def _collect(self, timeout_s: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any] | None] = [None] * self.world_size
        deadline = time.monotonic() + timeout_s
        while (silent := [rank for rank, answer in enumerate(answers) if answer is None]) and (
            left := deadline - time.monotonic()
        ) > 0:
            ready = wait([self._pipes[rank] for rank in silent], timeout=left)
            for rank in silent:
                if self._pipes[rank] in ready:
                    try:
                        answers[rank] = self._pipes[rank].recv()
                    except EOFError:
                        self._processes[rank].join(30)
                        answers[rank] = ("died", f"exit code {self._processes[rank].exitcode}")
            if any(answer is not None and answer[0] != "returned" for answer in answers):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return [answer or ("silent", f"no answer within {timeout_s:g} s") for answer in answers]


def _context() -> Any:
    method = os.environ.get(START_METHOD_VARIABLE)
    if method is None:
        method = "spawn" if os.environ.get("DS_ACCELERATOR") == "cuda" else "forkserver"
    context = mp.get_context(method)
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set what is not set, for the server that the first rank's start starts; and unset it again."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _serve(pipe: Connection, rank: int, world_size: int, port: int | None) -> None:
    """A rank's life: set up, say so, then answer one case after the other."""
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DEEPSPEED_LOG_LEVEL": "error",
        }
    )
    # DeepSpeed calls what torch has deprecated; a forked rank inherits pytest's filter, which makes errors of that.
    warnings.simplefilter("default")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        if port is not None:
            from tests.distributed.scenario import set_up_rank

            set_up_rank()
        pipe.send(("returned", pickle.dumps(None)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
        raise
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("returned", pickle.dumps(case(**arguments))))
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))
