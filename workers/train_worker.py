"""The Ray actor that owns one rank: it holds the rank's devices, and the process that trains on them.

The process is a copy of the node's fork server (`workers.fork_server`), fresh and with all imports done; it dies with
the actor. Whatever is said between the driver and the process passes through unread, so that nothing heavy is imported
here.
"""

import os
import socket
import threading
from dataclasses import dataclass
from typing import Final

from workers.background import Background
from workers.environment import prepare_environment
from workers.fork_client import RankProcess, Surroundings, fork_rank

# How long a process that hung up may take to be seen dead.
END_WAIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank runs, and where rank 0 listens for the others."""

    host: str
    port: int
    node_id: str
    pid: int
    """The process that trains."""
    actor_pid: int


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank's process ended: with a pickled RankResult, or by something that killed it."""

    result: bytes | None
    death: str | None = None


class TrainWorker:
    """One rank of a worker group. `address` and `poll` run beside `run`."""

    def __init__(self, assignment: bytes, rank: int, world_size: int, gpus_per_rank: float) -> None:
        """Start the rank's process; returns before it is there.

        Args:
            assignment: a pickled `workers.rank.Assignment`, for the process.
            rank: the world rank.
            world_size: the number of ranks.
            gpus_per_rank: below 1, other ranks share this one's device.
        """
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            # Each rank sees its own device alone, as number 0.
            LOCAL_RANK="0",
            LOCAL_SIZE="1",
        )
        if gpus_per_rank < 1:
            # NCCL refuses two ranks on one device of one host: let it take them for two hosts.
            os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-rank-{rank}"
        prepare_environment()
        host, device_ids = _host_and_devices()
        self._host = host
        self._started = Background(lambda: _start(assignment, host, device_ids))
        self._polls = threading.Lock()

    def address(self) -> Address:
        """Return where rank 0 listens, and every rank's node and processes; waits for the process."""
        import ray

        process, port = self._started.wait()
        return Address(self._host, port, ray.get_runtime_context().get_node_id(), process.pid, os.getpid())

    def poll(self) -> bytes | None:
        """Return a pickled `workers.rank.WorkerPoll`; None once the process is gone.

        Waits as long as the process does not run, and never for training.
        """
        process, _ = self._started.wait()
        with self._polls:
            try:
                process.polling.send_bytes(b"poll")
                return process.polling.recv_bytes()
            except (EOFError, OSError):
                return None

    def run(self, host: str, port: int) -> RankEnd:
        """Have the rank train the whole attempt, meeting the others at rank 0's address."""
        process, _ = self._started.wait()
        try:
            process.running.send((host, port))
            return RankEnd(process.running.recv_bytes())
        except (EOFError, OSError):
            return RankEnd(None, process.wait(END_WAIT_S))


def _start(assignment: bytes, host: str, device_ids: list[str]) -> tuple[RankProcess, int]:
    """Start the process and return it with its listening port."""
    process = fork_rank()
    try:
        process.running.send(Surroundings.here(host, device_ids))
        process.running.send_bytes(assignment)
        return process, int(process.running.recv())
    except (EOFError, OSError) as error:
        raise RuntimeError(f"the rank did not start: {process.wait(END_WAIT_S)}") from error


def _host_and_devices() -> tuple[str, list[str]]:
    import ray

    devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return ray.util.get_node_ip_address(), [str(device) for device in devices]
