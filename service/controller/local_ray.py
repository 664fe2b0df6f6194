"""The Ray head that `muonscope up` keeps on its own machine: started, found again, restarted when it dies, stopped.

It lives in a session of its own, so that neither Ctrl-C nor `kill -9` of the service touches it and its jobs; a
restarted service reads `MUONSCOPE_HOME/ray/head.json` and adopts it. A clean shutdown stops it, unless attempts are
live: then Ray and its jobs go on, and the next `muonscope up` picks them up.

All processes of a head carry its id in their environment: that, never a name, says what is ours to end.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from service.controller.process_birth import birth_of, was_born
from service.controller.worker_environment import WARM_POOL, count_real_gpus, worker_environment
from service.settings import Settings

logger = logging.getLogger(__name__)

HEAD_ID_VARIABLE: Final = "MUONSCOPE_RAY_HEAD"
# Each is a place for one rank. Four take two runs of two ranks side by side: much of a start is waiting.
LOGICAL_GPUS: Final = 4
OBJECT_STORE_BYTES: Final = 200_000_000
# Ray puts `session_<date>_<time>_<micros>_<pid>/sockets/plasma_store` under its folder, and a socket's path may
# have 107 characters.
_LONGEST_FOLDER: Final = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.12345")
# Its dashboard has Python make sockets of this form.
_LONGEST_TEMPORARY: Final = 107 - len("/pymp-12345678/listener-12345678")
_START_LIMIT_S: Final = 120.0
_WATCH_S: Final = 2.0
_RESTART_PAUSE_S: Final = 5.0
_TERM_WAIT_S: Final = 2.0
# Of the ended sessions: in it one may still look for why Ray failed.
_KEPT_SESSIONS: Final = 1
_SESSION: Final = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")
# The processes without which the head is dead, by what their command line contains.
_VITAL: Final = {"gcs": "gcs_server", "raylet": "raylet/raylet", "dashboard": "dashboard/dashboard.py"}


@dataclass(frozen=True, slots=True)
class Head:
    """A Ray head as `head.json` remembers it."""

    id: str
    address: str
    gpus: int
    vital: dict[str, list[float]] = field(default_factory=dict)
    """Role -> [pid, birth]; empty until the start has succeeded."""

    def is_alive(self) -> bool:
        return len(self.vital) == len(_VITAL) and all(_runs(int(pid), born) for pid, born in self.vital.values())


class LocalRay:
    """Keeps one head alive. The service asks it for the address and the token."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.home / "ray"
        self._file = self._folder / "head.json"
        self._token_file = self._folder / "auth_token"
        self._real_gpus = count_real_gpus()
        self._gpus = settings.gpus if settings.gpus is not None else (self._real_gpus or LOGICAL_GPUS)
        self._temp = session_folder(self._folder)
        self._head: Head | None = None
        self._token: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def address(self) -> str | None:
        """The dashboard's URL; None while there is no head."""
        return self._head.address if self._head is not None else None

    @property
    def gpus(self) -> int:
        """How many GPUs the head has, or will have once it has started."""
        return self._gpus

    @property
    def has_real_gpus(self) -> bool:
        """Whether this machine has a GPU; else those of the head are places to put a rank in."""
        return self._real_gpus > 0

    @property
    def token(self) -> str | None:
        return self._token

    def start(self, *, on_ready: Callable[[], None], keep_running: Callable[[], bool]) -> None:
        """Begin to keep a head, in the background; once is enough.

        Args:
            on_ready: called each time a head has become reachable.
            keep_running: whether attempts are live: a head of other size is then kept as it is.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._keep(on_ready, keep_running), name="local-ray")

    async def stop(self, *, keep_running: bool) -> None:
        """End keeping; end the head too, unless it is to keep running or was never this one's to keep."""
        self._stopping = True
        if self._task is None:
            # A controller that stood by: the head that the file names is the leader's.
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        head = self._head or self._read()
        if head is None:
            return
        if keep_running and head.is_alive():
            logger.info(
                "Ray goes on with its live runs at %s: `MUONSCOPE_HOME=%s muonscope up` takes both over again; to end "
                "both, start it, stop the runs (`muonscope stop RUN`), and end it then",
                head.address,
                self._folder.parent,
                extra={"action": "ray_kept"},
            )
            return
        await asyncio.to_thread(end_head, head.id)
        self._file.unlink(missing_ok=True)
        await asyncio.to_thread(self._remove_sessions)

    async def _keep(self, on_ready: Callable[[], None], keep_running: Callable[[], bool]) -> None:
        while not self._stopping:
            try:
                self._head = await self._adopt(keep_running) or await self._start()
                on_ready()
                while self._head.is_alive():
                    await asyncio.sleep(_WATCH_S)
                logger.error("the local Ray died; starting another", extra={"action": "ray_died"})
                dead, self._head = self._head, None
                await asyncio.to_thread(end_head, dead.id)
                continue
            except Exception:
                # Whatever it was (no port, a store that does not say what is live), nothing else would begin again.
                logger.exception("the local Ray did not start", extra={"action": "ray_start_failed"})
            self._head = None
            await asyncio.sleep(_RESTART_PAUSE_S)

    # -- finding it again --------------------------------------------------------------------------------------------

    def _read(self) -> Head | None:
        try:
            return Head(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    async def _adopt(self, keep_running: Callable[[], bool]) -> Head | None:
        head = self._read()
        if head is None:
            return None
        self._token = await asyncio.to_thread(self._make_token)
        if head.is_alive() and await self._answers(head):
            live = await asyncio.to_thread(keep_running)
            if head.gpus == self._gpus or live:
                logger.info("adopted the Ray at %s", head.address, extra={"action": "ray_adopted"})
                return head
        await asyncio.to_thread(end_head, head.id)
        self._file.unlink(missing_ok=True)
        return None

    async def _answers(self, head: Head) -> bool:
        headers = {"Authorization": f"Bearer {self._token}"}
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            for _ in range(10):
                try:
                    response = await client.get(f"{head.address}/api/version", headers=headers)
                    return response.status_code == 200
                except httpx.HTTPError:
                    await asyncio.sleep(0.5)
        return False

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _start(self) -> Head:
        self._token = await asyncio.to_thread(self._make_token)
        await asyncio.to_thread(self._make_folders)
        gcs, dashboard, agent, client = free_ports(4)
        head = Head(secrets.token_hex(8), f"http://127.0.0.1:{dashboard}", self._gpus)
        # Remembered before it runs: a service killed during the start still finds what to end.
        self._write(head)
        log = self._folder / "start.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ray.scripts.scripts", "start", "--head",
                f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
                f"--ray-client-server-port={client}", "--min-worker-port=0", "--max-worker-port=0",
                "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", "--include-dashboard=true",
                f"--num-gpus={self._gpus}", f"--object-store-memory={OBJECT_STORE_BYTES}",
                f"--temp-dir={self._temp}", "--disable-usage-stats",
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment(head), start_new_session=True, cwd=self._folder,
            )  # fmt: skip
        try:
            code = await asyncio.wait_for(process.wait(), _START_LIMIT_S)
        except (TimeoutError, asyncio.CancelledError):
            await asyncio.shield(asyncio.to_thread(end_head, head.id))
            raise
        if code != 0:
            await asyncio.to_thread(end_head, head.id)
            raise RuntimeError(f"`ray start` ended with code {code}: {_tail(log)}")
        head = Head(head.id, head.address, head.gpus, await asyncio.to_thread(_find_vital, head.id))
        self._write(head)
        if not head.is_alive() or not await self._answers(head):
            await asyncio.to_thread(end_head, head.id)
            raise RuntimeError(f"the new Ray at {head.address} does not answer: {_tail(log)}")
        kind = "GPUs" if self._real_gpus else "logical GPUs"
        logger.info("started Ray at %s with %d %s", head.address, head.gpus, kind, extra={"action": "ray_started"})
        return head

    def _environment(self, head: Head) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MUONSCOPE_", "RAY_")) or name.startswith("RAY_BACKEND_LOG")
        }
        return (
            kept
            | worker_environment(has_gpus=self._real_gpus > 0)
            | WARM_POOL
            | {
                HEAD_ID_VARIABLE: head.id,
                "TMPDIR": temporary_folder(),
                # `ray job submit -- muonscope run …`: the command is found, and by the home the service.
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
                "MUONSCOPE_HOME": str(self._folder.parent),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self._token_file),
                # Nothing here reads Ray's own metrics.
                "RAY_enable_metrics_collection": "false",
                # A stopped job has this long to report before SIGKILL.
                "RAY_JOB_STOP_WAIT_TIME_S": "3",
            }
        )

    def _make_token(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if token := self._token_file.read_text().strip():
                return token
        # Whole or not at all: on a full disk an empty file would be left, and no Ray start with it.
        draft = self._token_file.with_name(f"{self._token_file.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
            draft.replace(self._token_file)
        finally:
            draft.unlink(missing_ok=True)
        return self._token_file.read_text().strip()

    def _make_folders(self) -> None:
        make_private(self._temp.parent)
        self._temp.mkdir(mode=0o700, exist_ok=True)
        remove_ended_sessions(self._temp, keep=_KEPT_SESSIONS)

    def _remove_sessions(self) -> None:
        """Remove what the ended heads have left; outside of the home all of it, for nobody would look there."""
        is_inside = self._temp.is_relative_to(self._folder)
        remove_ended_sessions(self._temp, keep=_KEPT_SESSIONS if is_inside else 0)
        if not is_inside and not _live_sessions() & {path.name for path in self._temp.glob("session_*")}:
            shutil.rmtree(self._temp.parent, ignore_errors=True)

    def _write(self, head: Head) -> None:
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(asdict(head)))
        beside.replace(self._file)


def session_folder(folder: Path) -> Path:
    """Return where Ray keeps its sessions: under `folder` where the sockets' paths fit, else a short path of ours."""
    inside = folder / "sessions"
    if len(os.fsencode(inside)) <= _LONGEST_FOLDER:
        return inside
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:10]
    # In a folder of its own, for Ray opens the one it is given to everybody.
    below = Path(f"ms{os.getuid()}-{name}", "ray")
    short = Path(tempfile.gettempdir()) / below
    # TMPDIR may lie as deep as the home does.
    return short if len(os.fsencode(short)) <= _LONGEST_FOLDER else Path("/tmp") / below


def remove_ended_sessions(folder: Path, *, keep: int) -> None:
    """Remove the folders of Ray sessions that have ended, but for the `keep` newest; those with processes stay."""
    live = _live_sessions()
    ended = sorted(
        path
        for path in folder.glob("session_*")
        if _SESSION.fullmatch(path.name) and path.is_dir() and not path.is_symlink() and path.name not in live
    )
    for old in ended[: max(0, len(ended) - keep)]:
        shutil.rmtree(old, ignore_errors=True)


def _live_sessions() -> set[str]:
    """Return the names of all sessions that a process of this machine has on its command line, as Ray's own do."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.update(_SESSION.findall(" ".join(process.cmdline())))
    return found


def temporary_folder() -> str:
    """Return where Ray's processes keep temporary files: /tmp where a socket's path under TMPDIR would be too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_TEMPORARY else "/tmp"


def make_private(folder: Path) -> None:
    """Make a folder that nobody else reads or writes: Ray's logs and sockets lie open below it.

    Raises:
        RuntimeError: it is another user's, or no folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise RuntimeError(f"{folder} belongs to another user; set MUONSCOPE_HOME to a shorter path")
    folder.chmod(0o700)


def free_ports(count: int) -> list[int]:
    """Return distinct ports that are free now on every address."""
    held = []
    try:
        for _ in range(count):
            held.append(socket.socket())
            held[-1].bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()


def find_processes(head_id: str) -> list[psutil.Process]:
    """Return the head's processes: those that carry its id, and all that descend from them."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            # Ray's own workers retitle themselves over their environment: their parents lead to them.
            if process.environ().get(HEAD_ID_VARIABLE) == head_id:
                for member in (process, *process.children(recursive=True)):
                    found[member.pid] = member
    return list(found.values())


def end_left_head(home: Path) -> None:
    """End the head that a service on this home has left, with what runs on it; nothing where there is none."""
    try:
        head_id = str(json.loads((home / "ray" / "head.json").read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    end_head(head_id)


def end_head(head_id: str) -> None:
    """Stop all of a head's processes: SIGTERM, then SIGKILL for those that stay."""
    processes = find_processes(head_id)
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_TERM_WAIT_S)
    # What was born meanwhile, by a raylet that was still starting workers, is found now.
    for process in {process.pid: process for process in (*alive, *find_processes(head_id))}.values():
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=_TERM_WAIT_S)


def _find_vital(head_id: str) -> dict[str, list[float]]:
    vital: dict[str, list[float]] = {}
    for process in find_processes(head_id):
        with suppress(psutil.Error):
            command: Any = " ".join(process.cmdline()[:3])
            for role, mark in _VITAL.items():
                if mark in command:
                    vital.setdefault(role, [process.pid, birth_of(process)])
    return vital


def _runs(pid: int, born: float) -> bool:
    try:
        process = psutil.Process(pid)
        return was_born(process, born) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:].strip()
