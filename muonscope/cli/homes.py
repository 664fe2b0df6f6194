"""Which folder of state a service on this machine keeps: found from its process, never asked for over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx
import psutil

from muonscope.cli.findings import Finding, Level


def check_home(home: Path, url: str, *, is_up: bool) -> Finding:
    """Whether the service that answers keeps the state that this shell's settings name."""
    served = home_served_at(url) if is_up else home
    if served is None:
        # Its process is on another machine, or not to be looked at: what it has left for commands tells.
        is_same = _left_address(home) == url
    else:
        is_same = served.resolve() == home.resolve()
    if is_same:
        return Finding("state", Level.OK, f"in {home}")
    return Finding(
        "state",
        Level.NOTE,
        f"looked at is this shell's MUONSCOPE_HOME, {home}, which is not that of the service at {url}",
        f"to look at the service's: export MUONSCOPE_HOME={served}"
        if served is not None
        else "if it runs on this machine, set MUONSCOPE_HOME to its folder: of `make up`, .muonscope in the checkout",
    )


def home_served_at(url: str) -> Path | None:
    """Return the home of the `muonscope up` of this machine that listens there; None where none is to be seen."""
    from service.settings import is_loopback

    address = httpx.URL(url)
    if not is_loopback(address.host):
        return None
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        port = address.port or 80
        process = psutil.Process(next(each.pid for each in listening if each.pid and tuple(each.laddr)[1:2] == (port,)))
        words = process.cmdline()
        if "up" not in words or not any("muonscope" in word for word in words):
            return None
        named = process.environ().get("MUONSCOPE_HOME")
        return Path(process.cwd(), Path(named).expanduser()) if named else Path.home() / ".muonscope"
    except (psutil.Error, OSError, StopIteration):
        return None


def _left_address(home: Path) -> Any:
    try:
        return json.loads((home / "address.json").read_text())["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
