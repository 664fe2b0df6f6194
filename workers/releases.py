"""Unmodified DeepSpeed releases beside the installed one, each in a folder of its own.

    <home>/releases/deepspeed-0.19.2-cp311-torch2.13.0+cpu/  what pip put there, and nothing else
        installed.json                                       which file that was, by its SHA-256
    <home>/releases/.deepspeed-0.19.2-….lock                 held while one is installed

A rank of such a run has the folder in front of its PYTHONPATH, through Ray's runtime environment; torch and all else
are the interpreter's own. A folder is complete or not there: pip writes beside it, and a rename publishes it.

    python -m workers.releases 0.19.2        installs one beforehand: on a node without a way to the package index,
                                             with pip's own PIP_FIND_LINKS or PIP_INDEX_URL
"""

import argparse
import fcntl
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from muonscope.contract.releases import RELEASES, Release
from workers.background import Background
from workers.errors import ReleaseUnavailable

INSTALLED: Final = "installed.json"
# Fetching and building one takes half a minute on a quiet machine.
INSTALL_LIMIT_S: Final = 900.0
LOOK_AGAIN_S: Final = 0.2
# Building from source imports torch, and would look for devices and compilers that nothing here needs.
_BUILD_ENVIRONMENT: Final = {
    "DS_BUILD_OPS": "0",
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}

logger = logging.getLogger(__name__)


def is_installed_already(version: str) -> bool:
    """Whether this interpreter's own DeepSpeed is that release: then nothing stands in front of it."""
    try:
        return importlib.metadata.version("deepspeed").split("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def release_folder(root: Path, version: str) -> Path:
    """Return where a release lies for this interpreter and torch: its build has read both."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    torch = importlib.metadata.version("torch")
    return root / f"deepspeed-{version}-{python}-torch{torch}"


def import_path(folder: Path) -> str:
    """Return the PYTHONPATH that puts a release in front of what this process would find."""
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join([str(folder), *others])


def stands_in_front() -> bool:
    """Whether this process imports DeepSpeed from a release's folder, and not the interpreter's own."""
    # Not through sys.modules: what would be found counts, imported or not.
    found = importlib.machinery.PathFinder.find_spec("deepspeed")
    return found is not None and found.origin is not None and (Path(found.origin).parents[1] / INSTALLED).exists()


def ensure_installed(root: Path, version: str, give_up: threading.Event | None = None) -> Path:
    """Install a release unless it is there; returns its folder.

    Processes that ask at the same time wait for the one that installs, also over a shared file system.

    Args:
        root: the releases' folder.
        version: on the allow-list.
        give_up: ends the waiting and the installation when set.
    Raises:
        ReleaseUnavailable: pip did not install it; the message ends with what it said.
    """
    release, folder = RELEASES[version], release_folder(root, version)
    if _is_complete(folder, release):
        return folder
    deadline, give_up = time.monotonic() + INSTALL_LIMIT_S, give_up or threading.Event()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f".{folder.name}.lock", release, deadline, give_up):
            if not _is_complete(folder, release):
                _install(release, folder, deadline, give_up)
    except OSError as error:
        raise ReleaseUnavailable(version, f"{root} cannot be written: {error}") from error
    return folder


class Preparation:
    """A release on its way to every node that could hold a rank."""

    def __init__(self, root: Path, version: str) -> None:
        """Start installing; returns at once. Needs a connection to Ray."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._give_up = threading.Event()
        here = ray.get_runtime_context().get_node_id()
        self._here = Background(lambda: ensure_installed(root, version, self._give_up))
        remote = ray.remote(num_cpus=0, max_retries=0)(ensure_installed)
        self._elsewhere = [
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                root, version
            )
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("GPU") and node["NodeID"] != here
        ]

    def poll(self, wait_s: float) -> Path | None:
        """Wait for at most `wait_s`; returns the release's folder once it is on every node.

        Raises:
            ReleaseUnavailable: a node does not get it; says why.
        """
        import ray

        if not self._here.is_over(wait_s):
            return None
        folder = self._here.wait()
        if not self._elsewhere:
            return folder
        done, self._elsewhere = ray.wait(self._elsewhere, num_returns=len(self._elsewhere), timeout=wait_s)
        for reference in done:
            try:
                ray.get(reference)
            except ReleaseUnavailable:
                raise
            except ray.exceptions.RayError as error:
                # A node that is gone holds no rank.
                logger.warning("a node did not answer: %s", error, extra={"action": "release_node_lost"})
        return None if self._elsewhere else folder

    def cancel(self) -> None:
        """Stop installing here; what other nodes have begun they finish, for the next attempt."""
        self._give_up.set()


def _is_complete(folder: Path, release: Release) -> bool:
    try:
        said = json.loads((folder / INSTALLED).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("sha256") == release.sha256 and (folder / "deepspeed").is_dir()


@contextmanager
def _only_one(path: Path, release: Release, deadline: float, give_up: threading.Event) -> Iterator[None]:
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if give_up.wait(LOOK_AGAIN_S) or time.monotonic() > deadline:
                    raise ReleaseUnavailable(
                        release.version, f"another process has been installing it for too long ({path})"
                    ) from None
        # Closing the file lets go of it.
        yield


def _install(release: Release, folder: Path, deadline: float, give_up: threading.Event) -> None:
    logger.info("installing DeepSpeed %s into %s", release.version, folder, extra={"action": "install_release"})
    started = time.monotonic()
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        requirement = partial / "requirements.txt"
        requirement.write_text(f"deepspeed=={release.version} --hash=sha256:{release.sha256}\n")
        target = partial / "target"
        _run_pip(release, requirement, target, deadline, give_up)
        found = [distribution.version for distribution in importlib.metadata.distributions(path=[str(target)])]
        if [version.split("+")[0] for version in found] != [release.version]:
            raise ReleaseUnavailable(release.version, f"pip installed {found or 'nothing'} instead")
        facts = {"version": release.version, "sha256": release.sha256, "installed_at": time.time()}
        (target / INSTALLED).write_text(json.dumps(facts))
        # Left by another allow-list or a damaged disk: whoever still imports from it keeps what it has open.
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    took_s = time.monotonic() - started
    logger.info("DeepSpeed %s is there after %.0f s", release.version, took_s, extra={"action": "release_installed"})


def _run_pip(release: Release, requirement: Path, target: Path, deadline: float, give_up: threading.Event) -> None:
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--require-hashes", "--target", str(target), "--requirement", str(requirement),
    ]  # fmt: skip
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            env={**os.environ, **_BUILD_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if give_up.wait(LOOK_AGAIN_S) or time.monotonic() > deadline:
                    reason = "it was given up" if give_up.is_set() else f"pip took longer than {INSTALL_LIMIT_S:g} s"
                    raise ReleaseUnavailable(release.version, reason)
        finally:
            if process.returncode is None:
                # The build's own children too.
                os.killpg(process.pid, 9)
                process.wait()
        if process.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            raise ReleaseUnavailable(release.version, f"pip ended with {process.returncode}: {text[-2000:]}")


def main() -> None:
    """Run as `python -m workers.releases`."""
    parser = argparse.ArgumentParser(prog="workers.releases", description="Install DeepSpeed releases beforehand.")
    parser.add_argument("versions", nargs="+", choices=tuple(RELEASES), metavar="VERSION", help=", ".join(RELEASES))
    home = Path(os.environ.get("MUONSCOPE_HOME", "~/.muonscope"))
    parser.add_argument("--home", type=Path, default=home, help="Muonscope's home; default MUONSCOPE_HOME")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        for version in arguments.versions:
            print(ensure_installed(releases_root(arguments.home.expanduser()), version))
    except ReleaseUnavailable as error:
        sys.exit(str(error))


def releases_root(home: Path) -> Path:
    """Return the folder of all releases below Muonscope's home."""
    return home / "releases"


if __name__ == "__main__":
    main()
