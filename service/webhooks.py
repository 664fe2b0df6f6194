"""Webhooks: how a message is signed, where it may go, and how it is sent.

Signed as the Standard Webhooks specification says, so that its libraries verify them: HMAC-SHA256 with the rule's
secret over `id.timestamp.body`. A host's name is resolved once, and the connection goes to the address that was
checked: a name that resolves otherwise a moment later leads nowhere else.
"""

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Final

import httpx

from service.errors import InvalidInput
from service.settings import Settings

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Gives the addresses of a host, as text."""

MAX_RESPONSE_BYTES: Final = 500
_KEY_BYTES: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_PORTS: Final = {"https": 443, "http": 80}
_NAT64: Final = ip_network("64:ff9b::/96")
# A cloud's own endpoint that answers every machine of it, behind a number that looks public.
_PLATFORM: Final = frozenset({ip_address("168.63.129.16")})


class AddressRefused(Exception):
    """A webhook's host is at an address that it must not reach."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one attempt to deliver."""

    code: int | None = None
    """The HTTP status; None where there was no answer."""
    text: str = ""
    """The beginning of what was answered."""
    error: str | None = None
    """Why it was not taken; None where it was."""


class SigningKey:
    """The key that every rule's secret is derived from: secrets are in no database, and shown once."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path) -> "SigningKey":
        """Read the key; where there is none, make one that only this user reads."""
        try:
            return cls(_read_key(path))
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            # Unlike a rename, a link leaves alone what another process has made meanwhile.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        return cls(_read_key(path))

    @cached_property
    def id(self) -> str:
        """Tells keys apart without giving one away."""
        return hashlib.sha256(b"muonscope alert key" + self._key).hexdigest()[:16]

    def secret(self, alert_uid: str) -> str:
        """Return a rule's secret, as its receiver is given it."""
        return "whsec_" + base64.b64encode(self._secret(alert_uid)).decode()

    def headers(self, alert_uid: str, delivery_uid: str, timestamp: int, body: bytes) -> dict[str, str]:
        """Sign a message."""
        signed = f"{delivery_uid}.{timestamp}.".encode() + body
        signature = base64.b64encode(hmac.digest(self._secret(alert_uid), signed, "sha256")).decode()
        return {
            "webhook-id": delivery_uid,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": f"v1,{signature}",
        }

    def _secret(self, alert_uid: str) -> bytes:
        return hmac.digest(self._key, f"alert {alert_uid}".encode(), "sha256")


def _read_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) < _KEY_BYTES:
        raise ValueError(f"{path} holds {len(key)} bytes; a signing key has {_KEY_BYTES} or more")
    return key


def check_url(url: str, settings: Settings) -> None:
    """Refuse what no message could ever be sent to.

    Raises:
        InvalidInput: no web address, an unencrypted one, one with a password, or a private address.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise _refusal(url, f"is no address: {error}", "give https://host/path") from error
    if parsed.scheme not in _PORTS or not parsed.host:
        raise _refusal(url, "is no web address", "give https://host/path")
    if parsed.scheme == "http" and not settings.alert_allow_http:
        raise _refusal(url, "is not encrypted", "give an https:// address, or set MUONSCOPE_ALERT_ALLOW_HTTP=true")
    if parsed.userinfo:
        raise _refusal(url, "holds a user or a password", "leave them out; the message is signed")
    if parsed.fragment:
        raise _refusal(url, "has a fragment, which is never sent", "leave out what follows #")
    if not 0 < (parsed.port or 1) < 65536:
        raise _refusal(url, "has a port that is none", "give 1 to 65535")
    address = _number(parsed.host)
    if address is None and not _NAME.fullmatch(parsed.raw_host.decode("ascii")):
        raise _refusal(url, "names no host", "give https://host/path")
    # Where a name leads is asked when a message is sent.
    if address is not None and not may_reach(address, settings.alert_networks):
        raise _refusal(url, "is an address that is not public", "list its network in MUONSCOPE_ALERT_NETWORKS")


def _number(host: str) -> Address | None:
    """Read a host that is an address, also as the system's resolver would: `127.1`, `0x7f000001`."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _refusal(url: str, what: str, remedy: str) -> InvalidInput:
    return InvalidInput(f"the webhook's url {what}", field="url", value=shown_url(url), remedy=remedy)


def shown_url(url: str) -> str:
    """Return what of a webhook's address may be shown: not its path, which may hold a key."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return "…"
    port = f":{parsed.port}" if parsed.port is not None else ""
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    hides = parsed.userinfo or parsed.raw_path not in (b"", b"/") or parsed.fragment
    return f"{parsed.scheme}://{host}{port}/" + ("…" if hides else "")


def may_reach(address: Address, networks: Sequence[str]) -> bool:
    """Whether webhooks may go to an address: public ones, and those of the networks that the settings allow."""
    reached = _reached(address)
    if any(reached in ip_network(network) for network in networks):
        return True
    is_special = reached.is_multicast or reached.is_reserved or getattr(reached, "is_site_local", False)
    return reached.is_global and not is_special and reached not in _PLATFORM


def _reached(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 one leads to, where it carries one."""
    if isinstance(address, IPv4Address):
        return address
    carried = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
    if carried is None and (address in _NAT64 or 1 < int(address) < 2**32):
        carried = IPv4Address(int(address) & 0xFFFFFFFF)
    return carried or address


async def resolve(host: str, port: int) -> list[str]:
    """Ask the system for a host's addresses."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class Sender:
    """Sends messages: one connection each, to a checked address, without redirects, proxies or cookies."""

    def __init__(self, settings: Settings, *, resolver: Resolver = resolve, tls: ssl.SSLContext | None = None) -> None:
        """Open nothing yet.

        Args:
            settings: which networks may be reached, and how long an answer may take.
            resolver: asked once a message.
            tls: whom to trust; None trusts the usual authorities.
        """
        self._settings = settings
        self._resolve = resolver
        self._tls = tls

    async def send(self, url: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Post a message and say what became of it; never raises for what the other side does."""
        timeout_s = self._settings.alert_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._post(httpx.URL(url), body, headers)
        except TimeoutError:
            return Answer(error=f"no answer within {timeout_s:g} s")
        except AddressRefused as error:
            return Answer(error=str(error))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return Answer(error=f"{type(error).__name__}: {error}"[:MAX_RESPONSE_BYTES])

    async def _post(self, url: httpx.URL, body: bytes, headers: dict[str, str]) -> Answer:
        address = await self._pinned(url)
        request_headers = {
            **headers,
            "Host": url.netloc.decode("ascii"),
            "Content-Type": "application/json",
            "User-Agent": "muonscope",
            "Accept-Encoding": "identity",
        }
        if self._tls is None and url.scheme == "https":
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        # Connected by number, known by name: the certificate must be the host's.
        async with (
            httpx.AsyncClient(
                verify=self._tls or False, trust_env=False, follow_redirects=False,
                timeout=self._settings.alert_timeout_s,
            ) as client,
            client.stream(
                "POST", url.copy_with(host=address), content=body, headers=request_headers,
                extensions={"sni_hostname": url.host},
            ) as response,
        ):  # fmt: skip
            text = await _beginning(response)
        if response.is_success:
            return Answer(response.status_code, text)
        why = "answered with a redirect, which is not followed" if response.is_redirect else "refused it"
        return Answer(response.status_code, text, f"the receiver {why}: {response.status_code}")

    async def _pinned(self, url: httpx.URL) -> str:
        """Resolve a host once, and return the address to connect to."""
        try:
            found = [ip_address(url.host)]
        except ValueError:
            host = url.raw_host.decode("ascii")
            found = [ip_address(each) for each in await self._resolve(host, url.port or _PORTS[url.scheme])]
        if not found:
            raise AddressRefused(f"{url.host} has no address")
        for address in found:
            if not may_reach(address, self._settings.alert_networks):
                raise AddressRefused(
                    f"{url.host} leads to {address}, which is not public; list its network in MUONSCOPE_ALERT_NETWORKS"
                )
        return str(found[0])


async def _beginning(response: httpx.Response) -> str:
    read = b""
    async for piece in response.aiter_raw():
        read += piece[:MAX_RESPONSE_BYTES]
        if len(read) >= MAX_RESPONSE_BYTES:
            break
    return read[:MAX_RESPONSE_BYTES].decode("utf-8", "replace")
