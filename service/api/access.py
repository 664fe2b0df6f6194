"""Who may ask for what: the one table of scopes, and the middleware that holds every request against it.

A request proves itself by `Authorization: Bearer msc_…`, or by the cookie of a session (`POST /session`). Where a token
is needed, nothing but the open routes answers without one; a token that is given and wrong is refused everywhere else.
It stands before the body is read: whoever may not ask costs no memory.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muonscope.contract.status import TokenScope
from service.api.rate_limit import RateLimiter
from service.errors import Forbidden, RateLimited, ServiceError, Unauthorized, Unavailable
from service.store.audit import AuditAction, AuditRepository
from service.store.session import Database
from service.store.tokens import Identity, TokenRepository

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route asks of its caller."""

    scope: TokenScope | None
    """None: open to everybody."""
    creates_work: bool = False
    """Whether it is counted against the caller's rate."""


OPEN: Final = Rule(None)
READ: Final = Rule(TokenScope.READ)
SUBMIT: Final = Rule(TokenScope.SUBMIT)
SUBMIT_WORK: Final = Rule(TokenScope.SUBMIT, creates_work=True)
ADMIN: Final = Rule(TokenScope.ADMIN)

RULES: Final[dict[str, Rule]] = {
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    # The page itself and its scripts: it shows nothing before it may ask.
    "GET /": OPEN,
    "GET /ui/": OPEN,
    "GET /ui/{path:path}": OPEN,
    "GET /session": OPEN,
    "POST /session": OPEN,
    "DELETE /session": OPEN,
    # Each has the attempt's own token, or the one-use token that is exchanged for it.
    "POST /attempts/{attempt_id}/enrol": OPEN,
    "POST /attempts/{attempt_id}/facts": OPEN,
    "POST /attempts/{attempt_id}/heartbeat": OPEN,
    "POST /attempts/{attempt_id}/steps": OPEN,
    "POST /attempts/{attempt_id}/checkpoints": OPEN,
    "POST /attempts/{attempt_id}/logs": OPEN,
    "POST /attempts/{attempt_id}/load": OPEN,
    "POST /attempts/{attempt_id}/outcome": OPEN,
    "GET /openapi.json": READ,
    "GET /docs": READ,
    "GET /metrics": READ,
    "GET /cluster": READ,
    "GET /compare": READ,
    "GET /events": READ,
    "GET /experiments": READ,
    "GET /experiments/{experiment_id}.md": READ,
    "GET /experiments/{experiment_id}.csv": READ,
    "GET /experiments/{experiment_id}": READ,
    "GET /queue": READ,
    "GET /runs": READ,
    "GET /runs/counts": READ,
    "GET /runs/{run_id}": READ,
    "GET /runs/{run_id}/artifacts": READ,
    "GET /runs/{run_id}/artifacts/{name:path}": READ,
    "GET /runs/{run_id}/events": READ,
    "GET /runs/{run_id}/load": READ,
    "GET /runs/{run_id}/logs": READ,
    "GET /runs/{run_id}/parameters": READ,
    "GET /runs/{run_id}/parameters/{index}/steps": READ,
    "GET /runs/{run_id}/steps": READ,
    "POST /experiments": SUBMIT_WORK,
    "POST /imports/runs": SUBMIT_WORK,
    "POST /imports/steps": SUBMIT_WORK,
    "POST /recordings": SUBMIT_WORK,
    "POST /runs": SUBMIT_WORK,
    "POST /runs/validate": READ,
    "PATCH /runs/{run_id}": SUBMIT,
    "POST /runs/{run_id}/clone": SUBMIT_WORK,
    "POST /runs/{run_id}/retry": SUBMIT_WORK,
    "POST /runs/{run_id}/stop": SUBMIT,
    "DELETE /runs/{run_id}": ADMIN,
    "GET /audit": ADMIN,
    # The address that an alert is posted to is often a secret itself.
    "GET /alerts": ADMIN,
    "POST /alerts": ADMIN,
    "GET /alerts/{alert_id}": ADMIN,
    "DELETE /alerts/{alert_id}": ADMIN,
    "POST /alerts/{alert_id}/test": ADMIN,
    "GET /alerts/{alert_id}/deliveries": ADMIN,
    "POST /queue/pause": ADMIN,
    "POST /queue/resume": ADMIN,
    "POST /queue/drain": ADMIN,
    "PUT /queue/limits/{kind}/{name:path}": ADMIN,
    "DELETE /queue/limits/{kind}/{name:path}": ADMIN,
}
_MATCHERS: Final = [(key.split(" ")[0], compile_path(key.split(" ")[1])[0], rule) for key, rule in RULES.items()]
SESSION_COOKIE: Final = "muonscope_session"
UNSAFE: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# A stream that is open asks again this often whether its token still holds.
RECHECK_S: float = 30.0
_DISCARD_BYTES: Final = 64 * 1024 * 1024
_DISCARD_S: Final = 5.0
_NEEDED: Final = (
    "send Authorization: Bearer and a token of `muonscope token create`; commands take it from MUONSCOPE_TOKEN, "
    "the dashboard from its sign-in page"
)


def undeclared(routes: Iterable[Any]) -> list[str]:
    """List the routes whose scope the table does not say."""
    keys = {f"{method} {route.path}" for route in routes for method in route.methods if method != "HEAD"}
    return sorted(keys - RULES.keys())


def rule_for(method: str, path: str) -> Rule:
    """Return the rule of a request; one that leads to no route is answered with a 404 only for those who may read."""
    method = "GET" if method == "HEAD" else method
    for known, pattern, rule in _MATCHERS:
        if known == method and pattern.match(path):
            return rule
    return READ


class Authenticator:
    """Finds out who asks; notes failures, at most so many a minute."""

    def __init__(self, database: Database, *, standing_by: Callable[[], str | None] = lambda: None) -> None:
        """Read nothing yet.

        Args:
            database: the store.
            standing_by: why this controller must not write; None: it may.
        """
        self._database = database
        self._standing_by = standing_by
        self._noted = RateLimiter(rate_per_s=0.1, burst=10, max_callers=1)
        self._unnoted = 0
        # A store that takes no writes must not keep each reader waiting for one.
        self._uses = RateLimiter(rate_per_s=1 / 60, burst=1)

    def identify(self, headers: Headers) -> tuple[Identity | None, bool]:
        """Return whom the request proves to be, and whether a cookie is all that proves it. Blocks.

        Raises:
            Unauthorized: a bearer token is given and is nobody's.
        """
        token, cookie = bearer(headers), session_cookie(headers)
        if token is not None:
            return self.identify_token(token), False
        if cookie is None:
            return None, False
        with self._database.read() as session:
            return TokenRepository(session).identify_session(cookie), True

    def identify_token(self, token: str) -> Identity:
        """Return whom a token proves. Blocks.

        Raises:
            Unauthorized: nobody, or nobody any more.
        """
        with self._database.read() as session:
            identity = TokenRepository(session).identify(token)
        if identity is None:
            raise Unauthorized(
                "the token is not one of this service, or was revoked, or has expired",
                remedy="`muonscope token ls` on the service's machine lists what there is",
            )
        if identity.is_use_to_note and self._standing_by() is None and self._uses.pause(str(identity.token_id)) is None:
            # Who may ask is known: what cannot be noted now, on a full disk say, is noted later.
            with suppress(Unavailable), self._database.write(durable=False) as session:
                TokenRepository(session).note_use(identity.token_id)
        return identity

    def note_failure(self, address: str, method: str, path: str, why: str) -> None:
        """Leave an audit entry and a log line, unless there were many just now. Blocks."""
        if self._noted.pause("all") is not None:
            self._unnoted += 1
            return
        more = f"; {self._unnoted} more went unnoted" if self._unnoted else ""
        self._unnoted = 0
        detail = f"{method} {path[:200]}: {why}{more}"
        logger.warning("refused %s: %s", address, detail, extra={"action": "authentication_failed"})
        if self._standing_by() is not None:
            return
        with suppress(Unavailable), self._database.write(durable=False) as session:
            AuditRepository(session).append(
                AuditAction.AUTHENTICATION_FAILED, who="nobody", detail=detail, address=address
            )


def bearer(headers: Headers) -> str | None:
    """Return the bearer token; None where there is none, or another kind of credential, which is not ours."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def session_cookie(headers: Headers) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(SESSION_COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel is not None and morsel.value else None


def authority(origin: str) -> str | None:
    """Return an origin's host and port, lower case; None for what is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def client_address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


class _NoLongerAllowed(OSError):
    """Ends a stream whose token does not hold any more; Starlette takes an OSError for a client that left."""


class Access:
    """Holds each request against the table, names its caller, and bounds how much work a caller creates."""

    def __init__(
        self, app: ASGIApp, *, authenticator: Authenticator, is_token_needed: bool, limiter: RateLimiter
    ) -> None:
        self.app = app
        self._authenticator = authenticator
        self._is_token_needed = is_token_needed
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (rule := rule_for(scope["method"], scope["path"])).scope is None:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            identity = await self._admit(scope, headers, rule)
        except ServiceError:
            if scope["method"] in UNSAFE:
                # An answer that comes before the body was read is lost on clients that write first and read after.
                await _throw_away(receive)
            raise
        if identity is None:
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = identity.name
        await self._serve(scope, receive, send, headers)

    async def _admit(self, scope: Scope, headers: Headers, rule: Rule) -> Identity | None:
        assert rule.scope is not None
        try:
            identity, by_cookie = await self._identify(headers)
            if identity is None and self._is_token_needed:
                raise Unauthorized("this service answers only those who show a token", remedy=_NEEDED)
        except Unauthorized as error:
            where = client_address(scope), scope["method"], scope["path"]
            await run_in_threadpool(self._authenticator.note_failure, *where, error.detail)
            raise
        if identity is not None and not identity.scope.includes(rule.scope):
            raise Forbidden(
                f"the token {identity.name} has the scope {identity.scope}; this takes {rule.scope}",
                field="Authorization", remedy=f"use a token of the scope {rule.scope}",
            )  # fmt: skip
        if identity is not None and by_cookie and scope["method"] in UNSAFE:
            _require_same_origin(headers)
        if rule.creates_work:
            key = f"token {identity.token_id}" if identity is not None else f"address {client_address(scope)}"
            pause_s = self._limiter.pause(key)
            if pause_s is not None:
                raise _too_many(pause_s)
        return identity

    async def _identify(self, headers: Headers) -> tuple[Identity | None, bool]:
        if "authorization" not in headers and "cookie" not in headers:
            return None, False
        return await run_in_threadpool(self._authenticator.identify, headers)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        checked_at = time.monotonic()

        async def send_while_allowed(message: Message) -> None:
            nonlocal checked_at
            if message.get("more_body") and time.monotonic() - checked_at >= RECHECK_S:
                try:
                    identity, _ = await run_in_threadpool(self._authenticator.identify, headers)
                except ServiceError:
                    identity = None
                if identity is None:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    raise _NoLongerAllowed("the token does not hold any more")
                checked_at = time.monotonic()
            await send(message)

        try:
            await self.app(scope, receive, send_while_allowed)
        except Exception as error:
            if not isinstance(error.__context__, _NoLongerAllowed) and not isinstance(error, _NoLongerAllowed):
                raise


def _require_same_origin(headers: Headers) -> None:
    """A browser adds a session's cookie by itself: only our own pages may have it change something."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_ours = site == "same-origin" if site is not None else origin is not None
    if origin is not None:
        is_ours = is_ours and authority(origin) == headers.get("host", "").lower()
    if not is_ours:
        raise Forbidden(
            "a session's cookie is taken from our own pages only", field="Origin", value=origin,
            remedy="use the dashboard, or send the token itself as Authorization: Bearer",
        )  # fmt: skip


def _too_many(pause_s: float) -> RateLimited:
    wait_s = max(1, round(pause_s + 0.5))
    error = RateLimited(
        "this caller creates work faster than MUONSCOPE_SUBMIT_RATE_PER_S allows",
        field="Authorization",
        remedy=f"send it again in {wait_s} s; an Idempotency-Key keeps a repeat from becoming a second run",
    )
    error.headers = {"Retry-After": str(wait_s)}
    return error


async def _throw_away(receive: Receive) -> None:
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while size <= _DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
