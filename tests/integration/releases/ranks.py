"""Train specs under whatever DeepSpeed stands in front, in ranks forked from one process that has imported it.

    PYTHONPATH=<a release's folder>:<repository> python -m tests.integration.releases.ranks < specs.json

Standard input holds a list of specs; the last line of standard output is a list of what came of each, rank 0's view.
"""

import json
import multiprocessing as mp
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tests.integration.workers.local_ray import free_ports
from workers.environment import keep_compiler_unloaded, prepare_environment

CASE_LIMIT_S = 60.0


def main() -> None:
    prepare_environment(has_gpu=False)
    import torch

    keep_compiler_unloaded()
    torch.set_num_threads(1)
    import tests.integration.workers.training_cases  # noqa: F401

    # stdout is the answer's; a release that prints must not spoil it.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps([_train(spec) for spec in json.load(sys.stdin)]))
    answer.close()


def _train(spec: dict[str, Any]) -> Any:
    world_size, (port,) = spec.get("world_size", 1), free_ports(1)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, spec, theirs if rank == 0 else None))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        return ours.recv() if ours.poll(CASE_LIMIT_S) else {"crash": f"no answer within {CASE_LIMIT_S:g} s"}
    finally:
        for rank in ranks:
            rank.kill()


def _rank(rank: int, world_size: int, port: int, spec: dict[str, Any], answer: Connection | None) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        came_of_it = _attempt(rank, world_size, port, spec)
    except Exception:
        came_of_it = {"crash": traceback.format_exc()[-3000:]}
    if answer is not None:
        answer.send(came_of_it)


def _attempt(rank: int, world_size: int, port: int, spec: dict[str, Any]) -> Any:
    import deepspeed
    import torch.distributed as dist

    from muonscope.contract.run_spec import RunSpec
    from tests.integration.workers.training_cases import attempt
    from workers.engine import Place, join_process_group

    # A release's own, about a torch that came after it.
    warnings.simplefilter("ignore")
    join_process_group(dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0), Place(rank, world_size))
    came_of_it = attempt(RunSpec.model_validate(spec))
    return {**came_of_it, "version": deepspeed.__version__, "file": deepspeed.__file__}


if __name__ == "__main__":
    main()
