"""What commonly keeps runs from training on a machine, each with what was found and the remedy.

Every check looks and changes nothing. `fail` keeps runs from starting, `warn` may hurt later, `note` is good to know.
"""

import importlib.metadata
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import httpx

from muonscope.cli.findings import Finding, Level
from muonscope.cli.gpu_checks import check_gpus
from muonscope.cli.homes import check_home
from muonscope.client import Client
from muonscope.client.settings import trust_for
from muonscope.errors import MuonscopeError, ServiceUnreachable, UnexpectedAnswer
from service.settings import Settings

LOW_DISK_BYTES: Final = 5 * 1024**3
NO_DISK_BYTES: Final = 512 * 1024**2
CLOCK_SKEW_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 3.0
RAY_TEMPORARY: Final = Path("/tmp")
RAY_RELEASE: Final = "2.60."


Check = Callable[[], Finding]


def examine(settings: Settings, url: str) -> list[Finding]:
    """Run every check; one that breaks is itself a finding."""
    service = _examined("service", lambda: check_service(url))
    is_up = service.level is Level.OK
    checks: Sequence[tuple[str, Check]] = (
        ("state", lambda: check_home(settings.home, url, is_up=is_up)),
        ("clock", lambda: check_clock(url)),
        ("port", lambda: check_port(settings.host, settings.port, is_up=is_up)),
        ("ray", lambda: check_ray(settings.ray_address, settings.ray_token_file)),
        ("gpu", check_gpus),
        ("disk", lambda: check_disk([settings.home, Path(tempfile.gettempdir()), RAY_TEMPORARY])),
        ("build locks", lambda: check_build_locks(extension_folders())),
        ("schema", lambda: check_schema(settings.effective_database_url)),
    )
    return [_examined("packages", check_packages), service, *(_examined(name, check) for name, check in checks)]


def _examined(name: str, check: Check) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(name, Level.FAIL, f"the check itself failed: {type(error).__name__}: {error}")


def check_packages() -> Finding:
    """Whether what trains is installed, in the versions this release was made for."""
    wanted = {"torch": "", "deepspeed": "0.19.8", "ray": RAY_RELEASE}
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
        # The client itself is more patient than anyone who waits for a diagnosis.
        httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S, verify=trust_for(url))
    except httpx.HTTPError:
        return _unanswered(url)
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
    host, port = address.host, address.port or (443 if address.scheme == "https" else 80)
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


def check_port(host: str, port: int, *, is_up: bool) -> Finding:
    """Whether `muonscope up` could listen where it is told to, unless a service is up already."""
    if port == 0:
        return Finding("port", Level.OK, "`muonscope up` takes a free one")
    if is_up:
        return Finding("port", Level.OK, "a service is up already")
    # A second to import.
    from service.serve import AddressInUse, bind

    try:
        bind(host, port).close()
    except AddressInUse as error:
        return Finding(
            "port", Level.FAIL, f"`muonscope up` {error.strerror}",
            "end what listens there, or choose another: muonscope up --port 8801, or MUONSCOPE_PORT",
        )  # fmt: skip
    return Finding("port", Level.OK, f"{port} of {host} is free")


def check_clock(url: str) -> Finding:
    """Whether this machine and the service agree on the time."""
    try:
        response = httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S, verify=trust_for(url))
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


def check_ray(address: str | None, token_file: Path | None = None) -> Finding:
    """Whether the Ray cluster that was named answers, asks for a token and takes ours, and is of the right release."""
    if address is None:
        return Finding("ray", Level.OK, "none named: `muonscope up` starts a local one, with a token of its own")
    address = address.rstrip("/")
    token = None
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            return Finding(
                "ray", Level.FAIL, f"its token cannot be read: {error}", "have MUONSCOPE_RAY_TOKEN_FILE name its file"
            )
    try:
        bare = httpx.get(f"{address}/api/version", timeout=PROBE_TIMEOUT_S)
        given = bare if token is None else _with_token(address, token)
    except httpx.HTTPError as error:
        return Finding(
            "ray",
            Level.FAIL,
            f"no answer from {address} ({type(error).__name__})",
            "check --ray-address: it is the dashboard's, http://HEAD:8265",
        )
    if given.status_code in (401, 403):
        return _refused(address, token_file)
    if not given.is_success:
        return Finding(
            "ray",
            Level.FAIL,
            f"{address} answers {given.status_code}",
            "give the address of Ray's dashboard, port 8265",
        )
    version = _ray_version(given)
    if version is None or not version.startswith(RAY_RELEASE):
        return Finding(
            "ray", Level.FAIL, f"{address} is Ray {version or 'of no known version'}, not {RAY_RELEASE}*",
            f"install Ray {RAY_RELEASE}* on every node: a job's driver and its cluster must be of one release",
        )  # fmt: skip
    if bare.is_success:
        return Finding(
            "ray",
            Level.WARN,
            f"answers at {address} without a token: whoever reaches it, on this machine too, can run code there",
            "start Ray with RAY_AUTH_MODE=token, and name the token's file by MUONSCOPE_RAY_TOKEN_FILE",
        )
    return Finding("ray", Level.OK, f"Ray {version} at {address} takes the token of {token_file}")


def _with_token(address: str, token: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{address}/api/version", timeout=PROBE_TIMEOUT_S, headers=headers)


def _refused(address: str, token_file: Path | None) -> Finding:
    if token_file is None:
        return Finding(
            "ray", Level.FAIL, f"{address} asks for a token, and none is named",
            "have MUONSCOPE_RAY_TOKEN_FILE name the file of Ray's token",
        )  # fmt: skip
    return Finding(
        "ray", Level.FAIL, f"{address} refuses the token of {token_file}",
        "copy the token that Ray was started with into that file",
    )  # fmt: skip


def _ray_version(response: httpx.Response) -> str | None:
    try:
        return str(response.json()["ray_version"])
    except (ValueError, KeyError, TypeError):
        return None


def check_disk(folders: Sequence[Path]) -> Finding:
    """Whether there is room for the record, and for Ray's session."""
    free = {folder: shutil.disk_usage(_existing(folder)).free for folder in folders}
    folder, least = min(free.items(), key=lambda item: item[1])
    amount = f"{least / 1024**3:.1f} GiB" if least >= 1024**3 else f"{least // 1024**2} MiB"
    text = f"{amount} free under {folder}"
    if least < NO_DISK_BYTES:
        return Finding("disk", Level.FAIL, text, "free some: records and logs could not be written")
    if least < LOW_DISK_BYTES:
        return Finding("disk", Level.WARN, text, "free some before long runs: Ray stops placing work on full disks")
    return Finding("disk", Level.OK, text)


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def extension_folders() -> list[Path]:
    """Where torch builds C++ extensions: ours, a user's own by TORCH_EXTENSIONS_DIR, and torch's usual one."""
    from workers.environment import user_folder_path

    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    usual = Path.home() / ".cache" / "torch_extensions"
    return [*([Path(named)] if named else []), user_folder_path() / "torch_extensions", usual]


def check_build_locks(folders: Sequence[Path]) -> Finding:
    """Whether a killed build left its lock: every later build of that extension would wait for it for ever."""
    from workers.build_locks import examine_locks

    locks = examine_locks(lock for folder in folders if folder.exists() for lock in folder.glob("**/lock"))
    left = [lock.path for lock in locks if lock.is_left]
    if left:
        return Finding(
            "build locks",
            Level.FAIL,
            f"{_extensions(left)}: its builder is gone, and every start that needs it waits without a word",
            # Whoever waits takes a removed lock for a finished build.
            f"first end the scripts that wait for it, then: rm {_words(left)}",
        )
    building = [f"{_extensions([lock.path])} is being built by {lock.holder}" for lock in locks if lock.holder]
    building += [
        f"{_extensions([lock.path])} is being built by {', '.join(lock.compilers)}, whose script is gone: look again"
        for lock in locks
        if lock.compilers and not lock.holder
    ]
    return Finding("build locks", Level.NOTE if building else Level.OK, "; ".join(building) or "none left behind")


def _extensions(locks: Sequence[Path]) -> str:
    return ", ".join(lock.parent.name for lock in locks)


def _words(paths: Sequence[Path]) -> str:
    return " ".join(shlex.quote(str(path)) for path in paths)


def check_schema(database_url: str) -> Finding:
    """Whether the database is there, reachable, and of this version's schema."""
    from service.errors import ServiceError
    from service.store.migrate import SchemaTooNew, read_revisions
    from service.store.session import Database

    database = Database(database_url)
    try:
        if database.path is not None and not database.path.exists():
            return Finding("schema", Level.OK, f"no database yet: `muonscope up` makes {database.path}")
        current, head = read_revisions(database)
    except SchemaTooNew as error:
        return Finding(
            "schema", Level.FAIL,
            f"at {error.revision}, which this version does not know; its newest is {error.head}",
            "start the newer Muonscope, or name another database by MUONSCOPE_DATABASE_URL",
        )  # fmt: skip
    except ServiceError as error:
        return Finding("schema", Level.FAIL, error.detail, "see that it runs, and what MUONSCOPE_DATABASE_URL names")
    finally:
        database.dispose()
    if current == head:
        return Finding("schema", Level.OK, f"at {head}, the newest")
    if current is None:
        return Finding(
            "schema", Level.NOTE, "the database is empty", "muonscope db upgrade, which `muonscope up` does too"
        )
    return Finding(
        "schema",
        Level.WARN,
        f"at {current}, which is old; this version's newest is {head}",
        "muonscope db backup FILE, then muonscope db upgrade, which `muonscope up` does too",
    )
