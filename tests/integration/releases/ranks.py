"""Train specs under whatever DeepSpeed is asked for, in ranks forked from one process that has imported torch.

    python -m tests.integration.releases.ranks

Each line of standard input is an order: `{"folder": a release's, or null for the installed one, "specs": [...]}`. Each
line of standard output answers one, with a list of what came of each spec, rank 0's view. DeepSpeed is imported by a
process of the order's own, in which the release's folder stands in front of the import path.
"""

import json
import multiprocessing as mp
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tests.ports import hold_port, number_of
from workers.environment import keep_compiler_unloaded, prepare_environment

CASE_LIMIT_S = 200.0
ORDER_LIMIT_S = 400.0


def main() -> None:
    prepare_environment(has_gpu=False)
    import torch

    keep_compiler_unloaded()
    torch.set_num_threads(1)

    # stdout is the answers'; a release that prints must not spoil them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_follow(**json.loads(line))) + "\n")
        answers.flush()


def _follow(folder: str | None, specs: list[dict[str, Any]]) -> list[Any]:
    """Carry an order out in a process of its own."""
    ours, theirs = mp.get_context("fork").Pipe()
    process = mp.get_context("fork").Process(target=_import_and_train, args=(folder, specs, theirs))
    process.start()
    theirs.close()
    try:
        came_of_it: list[Any] = ours.recv() if ours.poll(ORDER_LIMIT_S) else [{"crash": "no answer to the order"}]
    except EOFError:
        process.join()
        came_of_it = [{"crash": f"the order's process ended by itself, exit code {process.exitcode}"}]
    process.kill()
    process.join()
    return came_of_it


def _import_and_train(folder: str | None, specs: list[dict[str, Any]], answer: Connection) -> None:
    if folder is not None:
        sys.path.insert(0, folder)
    import tests.integration.workers.training_cases  # noqa: F401

    answer.send([_train(spec) for spec in specs])


def _train(spec: dict[str, Any]) -> Any:
    world_size = spec.get("world_size", 1)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    with hold_port() as held:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, number_of(held), spec, theirs if rank == 0 else None))
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
