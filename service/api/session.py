"""The dashboard's sign-in: a token shown once becomes a cookie that scripts cannot read and other sites cannot use."""

from typing import Annotated

from fastapi import Body, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from muonscope.contract.status import TokenScope
from service.api.access import SESSION_COOKIE, Authenticator, client_address, session_cookie
from service.api.dependencies import DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, Out
from service.errors import Unauthorized
from service.store.audit import AuditAction, AuditRepository
from service.store.session import Database
from service.store.tokens import SESSION_DAYS, Identity, TokenRepository

router = Router(prefix="/session", tags=["access"], responses=PROBLEMS)


def get_authenticator(request: Request) -> Authenticator:
    authenticator: Authenticator = request.app.state.authenticator
    return authenticator


AuthenticatorDependency = Annotated[Authenticator, Depends(get_authenticator)]


class SignIn(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    token: str = Field(min_length=1, max_length=200)
    """As `muonscope token create` printed it."""


class SessionOut(Out):
    is_token_needed: bool
    """Whether this service answers only those who show a token."""
    name: str | None
    """The token's, where one was shown."""
    scope: TokenScope | None


@router.get("", summary="Read whether a token is needed, and whose was shown")
def read_session(request: Request, authenticator: AuthenticatorDependency, settings: SettingsDependency) -> SessionOut:
    identity, _ = authenticator.identify(request.headers)
    return _present(identity, settings.is_token_needed)


@router.post("", summary="Sign in: exchange a token for a session's cookie")
async def sign_in(
    asked: Annotated[SignIn, Body()],
    request: Request,
    response: Response,
    database: DatabaseDependency,
    authenticator: AuthenticatorDependency,
    settings: SettingsDependency,
) -> SessionOut:
    address = client_address(request.scope)
    try:
        identity = await run_in_threadpool(authenticator.identify_token, asked.token)
    except Unauthorized as error:
        await run_in_threadpool(authenticator.note_failure, address, "POST", "/session", error.detail)
        raise
    secret = await run_in_threadpool(_open, database, identity, address)
    response.set_cookie(
        SESSION_COOKIE,
        secret,
        max_age=SESSION_DAYS * 86400,
        httponly=True,
        samesite="strict",
        # Behind a proxy with TLS the scheme is the one that the proxy forwards.
        secure=request.url.scheme == "https",
    )
    return _present(identity, settings.is_token_needed)


@router.delete("", status_code=204, summary="Sign out: end the session")
def sign_out(request: Request, database: DatabaseDependency) -> Response:
    cookie = session_cookie(request.headers)
    if cookie is not None:
        with database.write() as session:
            TokenRepository(session).close_session(cookie)
    response = Response(status_code=204)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return response


def _open(database: Database, identity: Identity, address: str) -> str:
    with database.write() as session:
        AuditRepository(session).append(
            AuditAction.SIGNED_IN, who=identity.name, subject=identity.name, address=address
        )
        return TokenRepository(session).open_session(identity)


def _present(identity: Identity | None, is_token_needed: bool) -> SessionOut:
    return SessionOut(
        is_token_needed=is_token_needed,
        name=identity.name if identity is not None else None,
        scope=identity.scope if identity is not None else None,
    )
