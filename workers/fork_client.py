"""Ranks' processes, asked of this node's fork server (`workers.fork_server`), which is started where none runs yet.

    process = fork_rank()
    process.running, process.polling      # connections to the new process
    process.wait(timeout_s)               # how it ended

A server serves the processes that would import the same: its socket is named after the interpreter, where the packages
lie, the files' age, the environment variables that libraries read at import, and the Ray node. So an upgrade, another
DeepSpeed release or a restarted Ray get a server of their own. Imports here stay light: idle workers do it.
"""

import hashlib
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from workers.environment import user_folder

# What a request carries: the two channels, standard output, standard error.
DESCRIPTORS: Final = 4
# A process id, or a wait status.
WORD: Final = struct.Struct("=i")
# The kernel's word for who is at the other end: process, user and group.
CREDENTIALS: Final = struct.Struct("3i")
RAYLET_VARIABLE: Final = "RAY_RAYLET_PID"
# The imports of a server that has just been started, on a slow disk.
START_LIMIT_S: Final = 120.0
# A fork takes milliseconds; on a machine that is out of memory or processor, more.
ANSWER_LIMIT_S: Final = 60.0

# The packages whose place decides what a rank runs.
_PACKAGES: Final = ("torch", "deepspeed", "workers", "muon_core", "muonscope")
# Of these packages every file's age counts: they change under a living Ray when one develops or upgrades.
_OWN_PACKAGES: Final = ("workers", "muon_core", "muonscope")
# Variables that libraries read when they are imported or loaded, by how their names begin.
_READ_AT_IMPORT: Final = (
    "CUDA_HOME", "CUDA_MODULE", "DEEPSPEED", "DS_", "KMP_", "LD_", "MKL_", "MUON_CORE_", "OMP_", "OPENBLAS",
    "PYTHON", "PYTORCH", "TORCH", "TRITON",
)  # fmt: skip
_PER_RANK: Final = ("PYTHONPATH",)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rank takes over from its actor: a forked process has the fork server's."""

    environment: dict[str, str]
    folder: str
    import_path: list[str]
    host: str
    """The node's address, at which rank 0 listens."""
    device_ids: list[str]
    """The GPUs that Ray gave the actor, by their ids."""

    @classmethod
    def here(cls, host: str, device_ids: list[str]) -> Self:
        """Return this process's own."""
        return cls(dict(os.environ), str(Path.cwd()), list(sys.path), host, device_ids)

    def take_over(self) -> None:
        """Make them this process's own."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.import_path


@dataclass(slots=True)
class RankProcess:
    """A rank's process, which lives no longer than this object's process."""

    pid: int
    running: Connection
    """Carries the assignment there and the result back."""
    polling: Connection
    """Carries polls and their answers."""
    _server: socket.socket

    def close(self) -> None:
        """Hang up, which ends the process."""
        self.running.close()
        self.polling.close()
        self._server.close()

    def wait(self, timeout_s: float) -> str:
        """Say how the process ended, once it has; after `timeout_s` that it is unknown."""
        self._server.settimeout(timeout_s)
        try:
            answer = self._server.recv(WORD.size)
        except TimeoutError:
            return "its process hung up; its end is unknown"
        except OSError:
            answer = b""
        if len(answer) < WORD.size:
            return "its process is gone, and so is the fork server that knew why"
        code = os.waitstatus_to_exitcode(WORD.unpack(answer)[0])
        return f"its process was killed by {_signal_name(-code)}" if code < 0 else f"its process exited ({code})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"


def fork_rank() -> RankProcess:
    """Start a rank's process, a fork server first if need be.

    Raises:
        RuntimeError: no server came up; the message ends with what it said.
    """
    server = _connect(server_socket())
    running, its_running = socket.socketpair()
    polling, its_polling = socket.socketpair()
    with its_running, its_polling:
        socket.send_fds(server, [b"f"], [its_running.fileno(), its_polling.fileno(), 1, 2])
    process = RankProcess(0, Connection(running.detach()), Connection(polling.detach()), server)
    server.settimeout(ANSWER_LIMIT_S)
    try:
        answer = server.recv(WORD.size)
    except TimeoutError as error:
        pid, _, _ = CREDENTIALS.unpack(server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        process.close()
        raise RuntimeError(
            f"the fork server of this node, process {pid}, did not answer within {ANSWER_LIMIT_S:g} s: it was stopped, "
            "or hangs; kill it, and the next rank starts another one"
        ) from error
    if len(answer) < WORD.size:
        process.close()
        raise RuntimeError("the fork server of this node started no process: " + _last_words(server_socket()))
    process.pid = WORD.unpack(answer)[0]
    return process


def ensure_server() -> Path:
    """Start this node's fork server in the background unless it runs, and return its socket's path."""
    path = server_socket()
    if not path.exists():
        _start(path)
    return path


def server_socket() -> Path:
    """Return the path of the socket that serves processes like this one."""
    folder = user_folder() / "fork_server"
    folder.mkdir(mode=0o700, exist_ok=True)
    raylet = os.environ.get(RAYLET_VARIABLE, "")
    parts = [sys.executable, raylet, process_birth(int(raylet)) if raylet else ""]
    parts += [f"{name}={_origin(name)}" for name in _PACKAGES]
    parts += [sources_state()]
    parts += [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_READ_AT_IMPORT) and name not in _PER_RANK
    ]
    return folder / f"{hashlib.sha256(os.fsencode(chr(0).join(parts))).hexdigest()[:16]}.sock"


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yield a name for a socket that fits into the kernel's 107 characters, however deep its folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def lock_path(path: Path) -> Path:
    """Return the file that the server of this socket holds locked."""
    return path.with_suffix(".lock")


def process_birth(pid: int) -> str:
    """Return when a process began, in the kernel's ticks: with its id, it names a process for ever. "" once gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _connect(path: Path) -> socket.socket:
    deadline = time.monotonic() + START_LIMIT_S
    started_at = -START_LIMIT_S
    while True:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with reachable(path) as name:
                server.connect(name)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            server.close()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no fork server within {START_LIMIT_S:g} s: {_last_words(path)}") from error
            # Started again now and then: one that failed may have failed for want of memory.
            if time.monotonic() - started_at > START_LIMIT_S / 8:
                started_at = time.monotonic()
                _start(path)
            time.sleep(0.02)
        else:
            return server


def _start(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_folders())}
    with path.with_suffix(".log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "workers.fork_server", str(path)],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
            timeout=60,
        )


def _import_folders() -> list[str]:
    """Return the folders of the packages that a rank runs, in the order in which they are found.

    Not the whole path: a user's folder may hold anything, and the server is everybody's.
    """
    holders = {str(_origin(name).parent.parent) for name in _PACKAGES}
    return [folder for folder in dict.fromkeys(sys.path) if folder in holders]


def _origin(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"package {name} is not installed in {sys.prefix}")
    return Path(spec.origin)


def sources_state() -> str:
    """Return a digest of every source file of ours by name, age and size: an upgrade may well bring older files."""
    digest = hashlib.sha256()
    for name in _OWN_PACKAGES:
        for path in sorted(_origin(name).parent.rglob("*.py")):
            found = path.stat()
            digest.update(os.fsencode(f"{path} {found.st_mtime_ns} {found.st_size}\n"))
    return digest.hexdigest()


def _last_words(path: Path) -> str:
    try:
        text = path.with_suffix(".log").read_text(errors="replace")
    except OSError:
        return "it left no log"
    return text.strip()[-1000:] or "its log is empty"
