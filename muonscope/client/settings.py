"""Where the service is, for whoever talks to it."""

import getpass
import json
import ssl
from pathlib import Path
from typing import Final

import httpx
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from muonscope.errors import MuonscopeError, ServiceUnreachable

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
    """Sent as a bearer token; needed beyond loopback. By default what `token_file` holds."""
    token_file: Path | None = None
    """The file of the token, as secrets are mounted; by default `token` under `home`, if it is there."""
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
        meant = f"http://{url}" if url and "://" not in url else "an address such as http://127.0.0.1:8800"
        raise ServiceUnreachable(
            url, "not an address: it has to begin with http:// or https://", remedy=f"write {meant}"
        )
    return url.rstrip("/")


def trust_for(url: str) -> ssl.SSLContext | bool:
    """Return what a connection to the address trusts: over plain HTTP no authority, and so none has to be read."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http://") else True


def own_name() -> str:
    """Return the user's name on this machine; empty where it has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _kept_token(settings: ClientSettings) -> str | None:
    """Return what the token's file holds; None where none was named and the home has none for this user.

    Raises:
        MuonscopeError: a file was named, and holds nothing that this user may read.
    """
    file = (settings.token_file or settings.home / TOKEN_FILE).expanduser()
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if settings.token_file is None:
            return None
        raise _unusable_file(file, str(error)) from error
    if not token and settings.token_file is not None:
        raise _unusable_file(file, "it is empty")
    return token or None


def _unusable_file(file: Path, reason: str) -> MuonscopeError:
    return MuonscopeError(
        f"MUONSCOPE_TOKEN_FILE={file} gives no token: {reason}", remedy="name a file that holds one, or unset it"
    )


def request_headers(settings: ClientSettings, token: str | None) -> dict[str, str]:
    """Return what every request carries."""
    secret = token
    if secret is None:
        secret = (settings.token.get_secret_value() if settings.token else None) or _kept_token(settings)
    # Mounted secrets end with a newline, which no header can hold.
    secret = (secret or "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise MuonscopeError(
            "the token holds a character that no token has",
            remedy="set MUONSCOPE_TOKEN, or what its file holds, to the text that `muonscope token create` printed",
        )
    # A header holds no more than ASCII; a name that has more is still told apart.
    user = settings.user.encode("ascii", "backslashreplace").decode()
    return {
        **({"Authorization": f"Bearer {secret}"} if secret else {}),
        **({"Muonscope-User": user} if user else {}),
    }
