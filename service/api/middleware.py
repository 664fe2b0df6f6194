"""What every request passes, outermost first. Pure ASGI: nothing here buffers more than a bounded body.

ServerTiming      every answer says how long it took here
SecurityHeaders   nosniff, no framing, no referrer on every answer
TrustedCaller     the Host is ours; a browser's unsafe request comes from our own pages
Problems          whatever escapes becomes a problem document; a mistake of ours is logged once
Access            the caller may ask for this, and not too often (`access.py`)
BodyLimit         a body is as long as its path allows and arrives in time; JSON is read strictly
OneWriter         of several controllers on one store the one that leads takes what is written
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api import strict_json
from service.api.access import authority
from service.api.problems import render
from service.errors import (
    Forbidden,
    InvalidInput,
    PayloadTooLarge,
    RequestTooSlow,
    ServiceError,
    Unavailable,
    UnsupportedMediaType,
    UntrustedHost,
)

logger = logging.getLogger(__name__)

_TELEMETRY_PATH: Final = re.compile(r"/(?:attempts/[^/]+|imports)/steps")
# Telemetry within JSON: a record, and what says something of every parameter of a model.
_LARGE_JSON_PATH: Final = re.compile(r"/imports/runs|/attempts/[^/]+/(?:facts|outcome)")
_UNSAFE: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
# An answer that comes before the body was read is lost on clients that write first and read after: so much is read
# and thrown away for them.
_DRAIN_BYTES: Final = 256 * 1024 * 1024


class ServerTiming:
    """Puts the milliseconds until an answer began into `Server-Timing`, which browsers' tools show."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()

        async def send_with_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                spent_ms = (time.perf_counter() - begun) * 1000
                MutableHeaders(scope=message).append("Server-Timing", f"app;dur={spent_ms:.1f}")
            await send(message)

        await self.app(scope, receive, send_with_time if scope["type"] == "http" else send)


class SecurityHeaders:
    HEADERS: Final = {
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class TrustedCaller:
    """Refuses names that are not ours (DNS rebinding) and other sites' unsafe requests (cross-site forgery)."""

    def __init__(self, app: ASGIApp, *, hosts: Collection[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts) | _LOOPBACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(Headers(scope=scope), scope["method"])
            if error is not None:
                await render(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers, method: str) -> ServiceError | None:
        host = headers.get("host", "")
        if "*" not in self._hosts and _host_name(host) not in self._hosts:
            return UntrustedHost(
                "the Host header names a host that this service does not answer for", field="Host", value=host,
                remedy="use the address the service printed, or add the name to MUONSCOPE_ALLOWED_HOSTS",
            )  # fmt: skip
        origin = headers.get("origin")
        if method in _UNSAFE and origin is not None and authority(origin) != host.lower():
            return Forbidden(
                "another site's page sent this request", field="Origin", value=origin,
                remedy="use the dashboard, the command line or the API directly",
            )  # fmt: skip
        return None


def _host_name(host: str) -> str:
    host = host.lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


class OneWriter:
    """Refuses what would write while another controller leads: two writers would cross each other's rows."""

    def __init__(self, app: ASGIApp, *, standing_by: Callable[[], str | None]) -> None:
        self.app = app
        self._standing_by = standing_by

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in _UNSAFE and (reason := self._standing_by()) is not None:
            error = Unavailable(reason, remedy="send it there; this one serves reads, and takes over if that one ends")
            await render(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


class Problems:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception as error:
            if started:
                raise
            await render(_translate(error, scope))(scope, receive, send)


def _translate(error: Exception, scope: Scope) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error, extra={"action": "request_failed"})
    return ServiceError(
        "the service made a mistake; nothing of this request was stored", remedy="see the service's log"
    )


class BodyLimit:
    """Bounds bodies in bytes and seconds, and has JSON read strictly before anything else reads it."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_telemetry_bytes: int, timeout_s: float) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._max_telemetry_bytes = max_telemetry_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _UNSAFE:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_telemetry = _TELEMETRY_PATH.fullmatch(scope["path"]) is not None
        is_large = is_telemetry or _LARGE_JSON_PATH.fullmatch(scope["path"]) is not None
        limit = self._max_telemetry_bytes if is_large else self._max_bytes
        body = await self._read(headers, receive, limit)
        if body and not is_telemetry:
            _require_json(headers)
            strict_json.check(body)
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive, limit: int) -> bytes:
        chunks: list[bytes] = []
        size, over = 0, _announced(headers) > limit
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise InvalidInput("the client went away before its body was complete")
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    over = over or size > limit
                    if over:
                        chunks.clear()
                    else:
                        chunks.append(chunk)
                    if not message.get("more_body", False) or size > _DRAIN_BYTES:
                        break
        except TimeoutError:
            if not over:
                raise _too_slow(self._timeout_s) from None
        if over:
            raise PayloadTooLarge(
                f"the body is larger than {limit} bytes", field="body", value=f"more than {limit} bytes",
                remedy=f"send at most {limit} bytes",
            )  # fmt: skip
        return b"".join(chunks)


def _announced(headers: Headers) -> int:
    length = headers.get("content-length")
    return int(length) if length is not None and length.isdigit() and len(length) < 20 else 0


def _too_slow(limit_s: float) -> RequestTooSlow:
    error = RequestTooSlow(
        f"the body did not arrive within {limit_s:g} s", field="body", remedy="send it faster, or in smaller parts"
    )
    error.headers = {"Connection": "close"}
    return error


def _require_json(headers: Headers) -> None:
    content_type = headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if not re.fullmatch(r"application/(?:[\w.-]+\+)?json", media_type):
        raise UnsupportedMediaType(
            "the body is not sent as JSON", field="Content-Type", value=content_type,
            remedy="send Content-Type: application/json",
        )  # fmt: skip
