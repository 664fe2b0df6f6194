"""Idle Ray workers beside a fork server that has imported torch and DeepSpeed: ranks then start seconds sooner.

Ray does the work: `ray_start_environment` makes a cluster start idle worker processes and has each import
`workers.preload`, which starts the node's fork server; `refill` asks for new idle workers in place of those that an
attempt used up, for a process never serves twice. A cluster without any of this works too: its first attempt waits for
the server's imports.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable
from typing import Final

PRELOAD_VARIABLE: Final = "RAY_preload_python_modules"
PRELOAD_MODULE: Final = "workers.preload"
KEEP_ALIVE_S: Final = 3600
REQUEST_TIMEOUT_S: Final = 2.0

logger = logging.getLogger(__name__)


def ray_start_environment() -> dict[str, str]:
    """Return what to add to the environment of `ray start` on every node of a cluster that shall keep a warm pool."""
    return {PRELOAD_VARIABLE: PRELOAD_MODULE, "RAY_enable_worker_prestart": "true"}


def refill(node_ids: Iterable[str]) -> None:
    """Have one idle worker started for each entry of `node_ids`, in place of one that was used up there.

    Best effort: what does not work costs the next attempt a second or two, and no more. Needs a connection to Ray.
    """
    if os.environ.get(PRELOAD_VARIABLE) != PRELOAD_MODULE:
        return
    try:
        _refill(Counter(node_ids))
    except Exception as error:
        logger.info("no idle workers started: %s", error, extra={"action": "refill_failed"})


def _refill(wanted: Counter[str]) -> None:
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.common_pb2 import PYTHON
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

    for node in ray.nodes():
        if not wanted[node["NodeID"]]:
            continue
        channel = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
        request = PrestartWorkersRequest(
            language=PYTHON, num_workers=wanted[node["NodeID"]], keep_alive_duration_secs=KEEP_ALIVE_S
        )
        try:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=REQUEST_TIMEOUT_S)
        finally:
            channel.close()
