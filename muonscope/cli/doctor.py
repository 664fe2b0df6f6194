"""What commonly keeps runs from training on a machine, each with what was found and the remedy.

Every check looks and changes nothing. `fail` keeps runs from starting, `warn` may hurt later, `note` is good to know.
"""

import importlib.metadata
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import httpx

from muonscope.client import Client
from muonscope.errors import MuonscopeError, ServiceUnreachable, UnexpectedAnswer
from service.settings import Settings

LOW_DISK_BYTES: Final = 5 * 1024**3
NO_DISK_BYTES: Final = 512 * 1024**2
STALE_LOCK_S: Final = 300.0
CLOCK_SKEW_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 2.0
RAY_TEMPORARY: Final = Path("/tmp")


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    found: str
    remedy: str = ""


Check = Callable[[], Finding]


def examine(settings: Settings, url: str) -> list[Finding]:
    """Run every check; one that breaks is itself a finding."""
    checks: Sequence[tuple[str, Check]] = (
        ("packages", check_packages),
        ("service", lambda: check_service(url)),
        ("clock", lambda: check_clock(url)),
        ("ray", lambda: check_ray(settings.ray_address)),
        ("gpu", check_gpus),
        ("disk", lambda: check_disk([settings.home, RAY_TEMPORARY])),
        ("build locks", lambda: check_build_locks(extension_folders(settings.home))),
        ("schema", lambda: check_schema(settings.effective_database_url)),
    )
    return [_examined(name, check) for name, check in checks]


def _examined(name: str, check: Check) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(name, Level.FAIL, f"the check itself failed: {type(error).__name__}: {error}")


def check_packages() -> Finding:
    """Whether what trains is installed, in the versions this release was made for."""
    wanted = {"torch": "", "deepspeed": "0.19.8", "ray": "2.60."}
    found, wrong = [], []
    for name, prefix in wanted.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        found.append(f"{name} {version}")
        if not version.startswith(prefix):
            wrong.append(f"{name} {version} is not {prefix}*")
    if wrong:
        return Finding("packages", Level.FAIL, "; ".join(wrong), "pip install -c requirements.lock -e .")
    return Finding("packages", Level.OK, ", ".join(found))


def check_service(url: str) -> Finding:
    """Whether our service answers, nothing does, or another program holds its port."""
    try:
        with Client(url, retries=0) as client:
            client.health()
            client.readiness()
    except ServiceUnreachable:
        return _unanswered(url)
    except UnexpectedAnswer:
        return Finding(
            "service",
            Level.FAIL,
            f"another program answers at {url}",
            "end it, or choose a free port: muonscope up --port 8801",
        )
    except MuonscopeError as error:
        return Finding("service", Level.FAIL, f"answers at {url} and is not ready: {error}", error.remedy or "")
    return Finding("service", Level.OK, f"ready at {url}")


def _unanswered(url: str) -> Finding:
    """Tell a free port from one whose holder does not speak HTTP."""
    address = httpx.URL(url)
    host, port = address.host, address.port or 80
    try:
        with socket.create_connection((host, port), PROBE_TIMEOUT_S):
            pass
    except OSError:
        return Finding("service", Level.NOTE, f"not running at {url}; the port is free", "start it: muonscope up")
    return Finding(
        "service",
        Level.FAIL,
        f"port {port} of {host} is held by a program that does not answer as a service",
        "end it, or choose a free port: muonscope up --port 8801",
    )


def check_clock(url: str) -> Finding:
    """Whether this machine and the service agree on the time."""
    try:
        response = httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S)
        theirs = parsedate_to_datetime(response.headers["Date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError):
        return Finding("clock", Level.NOTE, "not compared: no service answers")
    # The header has whole seconds.
    skew_s = max(0.0, abs(time.time() - theirs) - 1.0)
    if skew_s > CLOCK_SKEW_S:
        return Finding(
            "clock",
            Level.WARN,
            f"this machine and the service differ by {skew_s:.0f} s",
            "set both clocks by NTP: times in records would mislead",
        )
    return Finding("clock", Level.OK, "this machine and the service agree")


def check_ray(address: str | None) -> Finding:
    """Whether the Ray cluster that was named answers; without one, `muonscope up` starts its own."""
    if address is None:
        return Finding("ray", Level.OK, "none named: `muonscope up` starts a local one")
    try:
        response = httpx.get(f"{address.rstrip('/')}/api/version", timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError as error:
        return Finding(
            "ray",
            Level.FAIL,
            f"no answer from {address} ({type(error).__name__})",
            "check --ray-address: it is the dashboard's, http://HEAD:8265",
        )
    if response.status_code in (401, 403):
        return Finding("ray", Level.OK, f"answers at {address}, with token authentication")
    if not response.is_success:
        return Finding("ray", Level.FAIL, f"{address} answers {response.status_code}", "is that Ray's dashboard?")
    host = httpx.URL(address).host
    if host not in ("127.0.0.1", "localhost", "::1"):
        return Finding(
            "ray",
            Level.WARN,
            f"answers at {address} without a token: whoever reaches it can run code there",
            "start Ray with RAY_AUTH_MODE=token, or keep its ports behind a firewall",
        )
    return Finding("ray", Level.OK, f"answers at {address}")


def check_gpus() -> Finding:
    """Whether GPUs are seen, and torch is a build that can use them."""
    torch_version = importlib.metadata.version("torch")
    names = _gpu_names()
    if not names:
        return Finding(
            "gpu", Level.NOTE, "none seen: runs take logical GPUs, gloo, and fp16 emulated on the CPU; labelled so"
        )
    if "+cpu" in torch_version:
        return Finding(
            "gpu",
            Level.FAIL,
            f"{len(names)} seen, but torch {torch_version} is a CPU build",
            "install torch's CUDA build into this environment",
        )
    return Finding("gpu", Level.OK, f"{len(names)} × {names[0]}, torch {torch_version}")


def _gpu_names() -> list[str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def check_disk(folders: Sequence[Path]) -> Finding:
    """Whether there is room for the record, and for Ray's session."""
    free = {folder: shutil.disk_usage(_existing(folder)).free for folder in folders}
    folder, least = min(free.items(), key=lambda item: item[1])
    text = f"{least / 1024**3:.1f} GiB free under {folder}"
    if least < NO_DISK_BYTES:
        return Finding("disk", Level.FAIL, text, "free some: records and logs could not be written")
    if least < LOW_DISK_BYTES:
        return Finding("disk", Level.WARN, text, "free some before long runs: Ray stops placing work on full disks")
    return Finding("disk", Level.OK, text)


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def extension_folders(home: Path) -> list[Path]:
    """Where torch builds C++ extensions: our own per environment under `home`, and torch's usual one."""
    return [home.expanduser(), Path.home() / ".cache" / "torch_extensions"]


def check_build_locks(folders: Sequence[Path]) -> Finding:
    """Whether a killed build left its lock: every later build of that extension would wait for it for ever."""
    now = time.time()
    locks = [lock for folder in folders if folder.exists() for lock in _locks_below(folder)]
    stale = [lock for lock in locks if now - lock.stat().st_mtime > STALE_LOCK_S]
    if not stale:
        return Finding("build locks", Level.OK, "none stale")
    names = " ".join(str(lock) for lock in stale)
    return Finding("build locks", Level.FAIL, f"stale: {names}", f"rm {names}")


def _locks_below(folder: Path) -> list[Path]:
    """torch's lock is a file named `lock` beside the build.ninja of the extension it guards."""
    return [lock for lock in folder.glob("**/lock") if lock.is_file() and (lock.parent / "build.ninja").exists()]


def check_schema(database_url: str) -> Finding:
    """Whether the database is there, reachable, and of this version's schema."""
    from service.store.migrate import read_revisions
    from service.store.session import Database

    database = Database(database_url)
    try:
        if database.path is not None and not database.path.exists():
            return Finding("schema", Level.OK, f"no database yet: `muonscope up` makes {database.path}")
        current, head = read_revisions(database)
    finally:
        database.dispose()
    if current == head:
        return Finding("schema", Level.OK, f"at {head}, the newest")
    if current is None:
        return Finding("schema", Level.NOTE, "the database is empty", "muonscope db upgrade")
    return Finding(
        "schema",
        Level.WARN,
        f"at {current}; this version's newest is {head}",
        "back the database up, then: muonscope db upgrade; if it is the newer one, use the newer Muonscope",
    )
