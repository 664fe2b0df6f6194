"""Where the service is, for whoever talks to it."""

from pathlib import Path
from typing import Final

import httpx
from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from muonscope.errors import ServiceUnreachable

DEFAULT_PORT: Final = 8800
DEFAULT_URL: Final = f"http://127.0.0.1:{DEFAULT_PORT}"


class ClientSettings(BaseSettings):
    """Read from `MUONSCOPE_*`; an argument of the command or of `Client` goes before it."""

    model_config = SettingsConfigDict(env_prefix="MUONSCOPE_", extra="ignore", use_attribute_docstrings=True)

    url: str = DEFAULT_URL
    """Address of the service."""
    token: SecretStr | None = None
    """Sent as a bearer token; needed beyond loopback."""
    home: Path = Path("~/.muonscope")
    """Folder of the state that a service started by a command keeps."""


def checked_url(url: str) -> str:
    """Return the address without a final slash; refuse what is none before anything is sent."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServiceUnreachable(url, f"not an address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServiceUnreachable(url, "not an address: it has to begin with http:// or https://")
    return url.rstrip("/")


def request_headers(settings: ClientSettings, token: str | None) -> dict[str, str]:
    """Return what every request carries."""
    secret = token or (settings.token.get_secret_value() if settings.token else None)
    return {"Authorization": f"Bearer {secret}"} if secret else {}
