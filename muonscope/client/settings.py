"""Where the service is, for whoever talks to it."""

import getpass
import json
from pathlib import Path
from typing import Final

import httpx
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from muonscope.errors import ServiceUnreachable

DEFAULT_PORT: Final = 8800
TOKEN_FILE: Final = "token"
DEFAULT_URL: Final = f"http://127.0.0.1:{DEFAULT_PORT}"


class ClientSettings(BaseSettings):
    """Read from `MUONSCOPE_*`; an argument of the command or of `Client` goes before it."""

    model_config = SettingsConfigDict(env_prefix="MUONSCOPE_", extra="ignore", use_attribute_docstrings=True)

    home: Path = Path("~/.muonscope")
    """Folder of the state that a service started by a command keeps."""
    url: str = Field(default_factory=lambda given: _recorded_url(given["home"]))
    """Address of the service; by default the one that `home` names as the last that was ready there, else
    http://127.0.0.1:8800."""
    token: SecretStr | None = None
    """Sent as a bearer token; needed beyond loopback. By default what the file `token` under `home` holds, if any."""
    user: str = Field(default_factory=lambda: own_name())
    """Said with every request: whose runs they are where no token proves it."""


def _recorded_url(home: Path) -> str:
    """Return the address that a service on this machine has left in its home; the usual one where none has."""
    try:
        return str(json.loads((home.expanduser() / "address.json").read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_URL


def checked_url(url: str) -> str:
    """Return the address without a final slash; refuse what is none before anything is sent."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServiceUnreachable(url, f"not an address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServiceUnreachable(url, "not an address: it has to begin with http:// or https://")
    return url.rstrip("/")


def own_name() -> str:
    """Return the user's name on this machine; empty where it has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _kept_token(home: Path) -> str | None:
    """Return what the home's token file holds; None where there is none that this user may read."""
    try:
        return (home.expanduser() / TOKEN_FILE).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def request_headers(settings: ClientSettings, token: str | None) -> dict[str, str]:
    """Return what every request carries."""
    secret = token or (settings.token.get_secret_value() if settings.token else None) or _kept_token(settings.home)
    # A header holds no more than ASCII; a name that has more is still told apart.
    user = settings.user.encode("ascii", "backslashreplace").decode()
    return {
        **({"Authorization": f"Bearer {secret}"} if secret else {}),
        **({"Muonscope-User": user} if user else {}),
    }
