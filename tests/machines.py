"""Machines of a test's own, as far as programs can tell: each has its network, processes, host name and mounts.

A machine is a set of the kernel's namespaces, held by one process: where that dies, so does everything on the machine,
at once, as when the power goes. Programs and packages are this machine's own files. It takes the right to make
namespaces, which root has.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

REPOSITORY: Final = Path(__file__).resolve().parents[1]
_HOLD: Final = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_BRING_UP: Final = 'hostname "$1"; ip link set lo up; mount --bind "$2" /etc/hosts; echo up; exec sleep infinity'
_START_LIMIT_S: Final = 60.0
_END_LIMIT_S: Final = 60.0


def refusal() -> str | None:
    """Say why no machine of a test's own can be made here; None where one can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    done = subprocess.run([*_HOLD, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no network of a test's own can be made here: {done.stderr.strip()}"


class Machine:
    """One machine. End it with `close`, or lose it with `lose_power`."""

    def __init__(self, name: str, folder: Path, hosts: Mapping[str, str] | None = None) -> None:
        """Bring it up, with nothing but loopback.

        Args:
            name: its host name.
            folder: for its own files; what is at `folder / "tmp"` is its alone, whatever other machines call it.
            hosts: names that it knows, each with its address.
        """
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)
        # As Debian writes it: a name of one's own that leads others nowhere.
        lines = [
            "127.0.0.1 localhost",
            f"127.0.1.1 {name}",
            *(f"{address} {host}" for host, address in (hosts or {}).items()),
        ]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        self._holder = subprocess.Popen(
            [*_HOLD, "sh", "-ec", _BRING_UP, "hold", name, str(folder / "hosts")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().decode()
        if said != "up\n":
            said += self._holder.stdout.read().decode()
            self.close()
            raise RuntimeError(f"no machine of a test's own can be made here, as root can: {said}")
        self.pid = self._first_process()
        self._has_card = False
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def mount(self, source: Path, target: Path) -> None:
        """Show the folder `source` at `target`, to this machine alone; both have to be there."""
        self.call("mount", "--bind", str(source), str(target))

    def empty(self, *folders: Path) -> None:
        """Lay an empty folder, kept in memory, over each of these, for this machine alone."""
        for folder in folders:
            self.call("mount", "-t", "tmpfs", "-o", "mode=755", "none", str(folder))

    def become_switch(self, address: str) -> None:
        """Give it the address, on a bridge that other machines plug into."""
        self.call("ip", "link", "add", "br0", "type", "bridge")
        self.call("ip", "address", "add", f"{address}/24", "dev", "br0")
        self.call("ip", "link", "set", "br0", "up")

    def plug_into(self, switch: "Machine", address: str) -> None:
        """Lay a cable to a switch: a card `eth0` with the address."""
        port = f"to-{self.pid}"
        # Made among this machine's cards at once: the one that the test runs on gets none.
        enter = ["nsenter", "--target", str(self.pid), "--net", "--"]
        pair = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", str(switch.pid)]
        subprocess.run([*enter, *pair], check=True, timeout=30)
        switch.call("ip", "link", "set", port, "master", "br0", "up")
        self.call("ip", "address", "add", f"{address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "eth0", "up")
        self._has_card = True

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        folder: Path | None = None,
        user: str | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a program; it ends with the machine at the latest."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self._enter(folder), *_as(user), *command], env=dict(environment), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output,
            )  # fmt: skip
        self._started.append(process)
        return process

    def call(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """Run a program to its end, and return what it printed; anything but success is an error."""
        done = subprocess.run(
            [*self._enter(), *_as(user), *command], env=None if environment is None else dict(environment),
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{self.name}: {' '.join(command)} ended with {done.returncode}: " + (
            done.stdout[-2000:] + done.stderr[-4000:]
        )
        return done.stdout

    def client(self, port: int, **options: Any) -> httpx.Client:
        """Return a client of what listens on the machine's loopback: a door through the file system leads there."""
        door = self.folder / f"port-{port}"
        self.start([sys.executable, __file__, str(door), str(port)], os.environ, self.folder / "door.log")
        deadline = time.monotonic() + _START_LIMIT_S
        while not door.exists():
            assert time.monotonic() < deadline, (self.folder / "door.log").read_text()
            time.sleep(0.02)
        transport = httpx.HTTPTransport(uds=str(door))
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=30, **options)

    def bytes_received(self) -> int:
        """How much came in over its cable."""
        # Not from /sys, which shows the cards of whoever mounted it.
        (card,) = json.loads(self.call("ip", "-json", "-statistics", "link", "show", "eth0"))
        return int(card["stats64"]["rx"]["bytes"])

    def lose_power(self) -> None:
        """End every process on the machine at once, without a goodbye: its cable carries nothing any more."""
        if self._has_card:
            self.call("ip", "link", "set", "eth0", "down")
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._end()

    def close(self) -> None:
        if self._holder.poll() is None:
            self._holder.kill()
        self._end()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def _end(self) -> None:
        self._holder.wait(_END_LIMIT_S)
        for process in self._started:
            process.wait(_END_LIMIT_S)

    def _enter(self, folder: Path | None = None) -> list[str]:
        where = f"--wd={folder or self.folder}"
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", where, "--"]

    def _first_process(self) -> int:
        """Return the outer id of the machine's first process: the namespaces are its, not its parent's."""
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        return int(children.read_text().split()[0])


def short_folder() -> Path:
    """Make a folder with a short path, for sockets' paths are limited."""
    return Path(tempfile.mkdtemp(prefix="mm-", dir="/tmp"))


def wait_until(is_so: Callable[[], bool], limit_s: float, what: str, log: Callable[[], str] = lambda: "") -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}\n{log()}"
        time.sleep(0.1)


def _as(user: str | None) -> list[str]:
    return [] if user is None else ["runuser", "-u", user, "--"]


def _serve_door(door: str, port: int) -> None:
    """Pass each connection to the socket file `door` on to a port of this machine's loopback."""
    with socket.socket(socket.AF_UNIX) as listener:
        # Under its name only once it listens: who waits for the file connects at once.
        listener.bind(f"{door}.new")
        listener.listen()
        Path(f"{door}.new").rename(door)
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                near.close()
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    _serve_door(sys.argv[1], int(sys.argv[2]))
