"""The fork server: one process a node that has imported torch and DeepSpeed once, and of which every rank is a copy.

    python -m workers.fork_server SOCKET

A rank needs a fresh process, and a fresh process spends four seconds of processor time on imports. Forked from here it
has them at once, and shares their memory. The server itself trains nothing, touches no device and starts no thread:
what is copied is a process that has only imported libraries.

A client (`workers.fork_client`) connects, passes four descriptors (the rank's two channels, its standard output and
error) and keeps the connection: when it closes, for whatever reason, the rank is killed; when the rank ends first, its
wait status comes back. The ranks die with the server, and the server ends with the Ray node it serves.
"""

import argparse
import ctypes
import fcntl
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Final

from workers.environment import has_gpu_driver, keep_compiler_unloaded, prepare_environment
from workers.fork_client import (
    CREDENTIALS,
    DESCRIPTORS,
    RAYLET_VARIABLE,
    WORD,
    lock_path,
    process_birth,
    reachable,
    sources_state,
)
from workers.releases import stands_in_front

TICK_S: Final = 1.0
REQUEST_TIMEOUT_S: Final = 5.0
# Without a rank for this long, the memory is better given back: the next rank pays for the imports.
IDLE_LIMIT_S: Final = 3600.0
# One that stands on another DeepSpeed release serves an experiment: a bisect would leave a dozen of them behind.
RELEASE_IDLE_LIMIT_S: Final = 60.0
UPGRADE_CHECK_S: Final = 15.0
# What a server that has ended leaves behind is kept as long, for whoever asks why.
LEFTOVER_AGE_S: Final = 3600.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15

logger = logging.getLogger(__name__)


class ForkServer:
    """Serves one socket until its Ray node is gone or nobody came for too long."""

    def __init__(self, path: Path, raylet_pid: int | None, sources: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._raylet = None if raylet_pid is None else (raylet_pid, process_birth(raylet_pid))
        self._sources = sources
        self._sources_checked_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, socket.socket] = {}
        self._used_at = time.monotonic()
        self._idle_limit_s = RELEASE_IDLE_LIMIT_S if stands_in_front() else IDLE_LIMIT_S
        self._wakeup, self._signalled = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(self) -> None:
        """Serve; returns when there is nothing more to serve, all ranks killed."""
        self._listen()
        try:
            while self._is_needed():
                for key, _ in self._selector.select(TICK_S):
                    self._handle(key.fileobj)
        finally:
            self._path.unlink(missing_ok=True)
            signal.set_wakeup_fd(-1)
            for pid in self._ranks:
                os.kill(pid, signal.SIGKILL)

    def _listen(self) -> None:
        for end in (self._wakeup, self._signalled):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        # Bound under another name first: whoever finds the socket finds it listening.
        beside = self._path.with_suffix(".new")
        beside.unlink(missing_ok=True)
        with reachable(beside) as name:
            self._listener.bind(name)
        self._listener.listen(64)
        beside.rename(self._path)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _is_needed(self) -> bool:
        if self._raylet is not None and process_birth(self._raylet[0]) != self._raylet[1]:
            return False
        return bool(self._ranks) or not (self._is_idle() or self._is_outdated())

    def _is_idle(self) -> bool:
        return time.monotonic() - self._used_at > self._idle_limit_s

    def _is_outdated(self) -> bool:
        """Whether the sources changed: clients ask for a server of another name then, and nobody for this one."""
        if time.monotonic() - self._sources_checked_at < UPGRADE_CHECK_S:
            return False
        self._sources_checked_at = time.monotonic()
        return sources_state() != self._sources

    def _handle(self, ready: object) -> None:
        if ready is self._listener:
            self._accept()
        elif ready is self._wakeup:
            self._reap()
        else:
            # A client says nothing after its request: what can be read is its end.
            for pid, client in self._ranks.items():
                if client is ready:
                    os.kill(pid, signal.SIGKILL)
                    self._selector.unregister(client)
                    return

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            # Its client is gone, or this process has no descriptor left: the ranks that live go on.
            logger.warning("no rank was started: %s", error, extra={"action": "request_refused"})
            return
        client.settimeout(REQUEST_TIMEOUT_S)
        descriptors: list[int] = []
        try:
            if _peer_user(client) != os.getuid():
                raise PermissionError("the client belongs to another user")
            _, descriptors, _, _ = socket.recv_fds(client, 1, DESCRIPTORS)
            if len(descriptors) != DESCRIPTORS:
                raise OSError("the request is incomplete")
            pid = os.fork()
        except OSError as error:
            logger.warning("no rank was started: %s", error, extra={"action": "request_refused"})
            client.close()
            _close(descriptors)
            return
        if pid == 0:
            self._become_rank(client, descriptors)
        _close(descriptors)
        self._used_at = time.monotonic()
        self._ranks[pid] = client
        self._selector.register(client, selectors.EVENT_READ)
        with suppress(OSError):
            client.sendall(WORD.pack(pid))

    def _become_rank(self, client: socket.socket, descriptors: list[int]) -> None:
        """The rest of a rank's life; does not return."""
        status, server = 1, self._pid
        try:
            # Before anything else: a rank must not outlive the server that would kill it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != server:
                # It died in between: no signal will come for that.
                return
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for ours in (client, self._listener, self._wakeup, self._signalled, *self._ranks.values()):
                ours.close()
            # The lock is the server's alone.
            os.close(_lock)
            running, polling, output, errors = descriptors
            os.dup2(output, 1)
            os.dup2(errors, 2)
            _close([output, errors])
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"muonscope-rank", 0, 0, 0)
            from workers.rank import serve

            serve(running, polling)
            status = 0
        except BaseException:
            logger.exception("the rank's process failed", extra={"action": "rank_failed"})
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                continue
        while self._ranks:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client = self._ranks.pop(pid, None)
            if client is None:
                continue
            with suppress(KeyError, ValueError):
                self._selector.unregister(client)
            with suppress(OSError):
                client.sendall(WORD.pack(status))
            client.close()
            self._used_at = time.monotonic()


def preload() -> None:
    """Import what ranks need, as far as that touches no device."""
    prepare_environment()
    import torch  # noqa: F401

    keep_compiler_unloaded()
    if not has_gpu_driver():
        # With a GPU, DeepSpeed chooses its accelerator at import, and asks the device for it: no copy could use it.
        import workers.train_loop
    import workers.rank  # noqa: F401

    # What exists now is never collected: neither looked at again, nor copied for the looking.
    gc.collect()
    gc.freeze()


def _peer_user(client: socket.socket) -> int:
    _, user, _ = CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(user)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def take_lock(path: Path) -> int | None:
    """Lock a socket's lock file; None where the server that serves it holds it."""
    while True:
        descriptor = os.open(lock_path(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        # Swept away between opening and locking: the next server would lock another file.
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the files of servers that have ended some time ago; those of living ones are locked and stay."""
    for lock in folder.glob("*.lock"):
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files = [lock.with_suffix(suffix) for suffix in (".log", ".sock", ".new", ".lock")]
                newest = max(file.stat().st_mtime for file in files if file.exists())
                if time.time() - newest > LEFTOVER_AGE_S:
                    # The lock last: while it is there, it is held.
                    for file in files:
                        file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


_lock = -1


def main() -> None:
    """Run as `python -m workers.fork_server`; ends at once where another one serves the socket already."""
    global _lock
    parser = argparse.ArgumentParser(prog="workers.fork_server", description=__doc__)
    parser.add_argument("socket", type=Path)
    arguments = parser.parse_args()
    # A grandchild belongs to nobody here: Ray's clean-up of a worker's children would end it with its first client.
    if os.fork():
        os._exit(0)
    taken = take_lock(arguments.socket)
    if taken is None:
        os._exit(0)
    _lock = taken
    sweep(arguments.socket.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Libraries keep threads of their own after import (numpy's), which no copy needs; Python 3.12 warns of each.
    warnings.filterwarnings(
        "ignore", message=".*use of fork\\(\\) may lead to deadlocks.*", category=DeprecationWarning
    )
    # Before the imports: a file that changes meanwhile shows.
    sources = sources_state()
    preload()
    raylet = os.environ.get(RAYLET_VARIABLE)
    ForkServer(arguments.socket, int(raylet) if raylet else None, sources).serve()


if __name__ == "__main__":
    main()
