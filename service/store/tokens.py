"""Users' tokens and the dashboard's sessions: made once, found by the hash of their secret, revoked for good."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.orm import Session, joinedload

from muonscope.contract.status import TokenScope
from service.errors import Conflict, InvalidInput, NotFound
from service.store.access_models import ApiToken, WebSession
from service.store.audit import AuditAction, AuditRepository
from service.store.types import read_clock, storable_text

# Recognisable where it should not be, in a log or a repository; and no token begins with a dash, as an option does.
PREFIX: Final = "msc_"
MAX_NAME_LENGTH: Final = 100
SESSION_DAYS: Final = 7
_TEXT_BYTES: Final = 32
# As many characters as that many random bytes take: a shorter one could be guessed from its hash.
TEXT: Final = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43,128}")
_REMEDY: Final = f"write {PREFIX} and what `openssl rand -hex 32` prints into the file"
_USED_EVERY: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a secret proves the caller to be."""

    token_id: int
    name: str
    scope: TokenScope
    is_use_to_note: bool


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class TokenRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        name: str,
        scope: TokenScope,
        *,
        who: str,
        expires_at: datetime | None = None,
        text: str | None = None,
    ) -> tuple[ApiToken, str]:
        """Make a token.

        Args:
            name: who or what will use it.
            scope: what it may be used for.
            who: by whom it is made.
            expires_at: when it ends; None is never.
            text: what somebody else has drawn and keeps; None draws it here.
        Returns:
            Its row, and its text, which is kept nowhere.
        Raises:
            InvalidInput: the name is empty, too long or unprintable, the end is past, or the text is no token's.
            Conflict: the name or the text is or was another token's: entries that name it would speak of two.
        """
        name = name.strip()
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidInput(
                "a token's name is 1 to 100 printable characters", field="name", value=name,
                remedy="name it after who or what will use it",
            )  # fmt: skip
        now = read_clock(self._session)
        if expires_at is not None and expires_at <= now:
            raise InvalidInput(
                "the token would have expired already", field="expires", value=expires_at.isoformat(),
                remedy="give a time to come, or none",
            )  # fmt: skip
        if self._named(name) is not None:
            raise Conflict(
                f"there is a token {name!r} already, or was one", field="name", value=name,
                remedy="give another name; `muonscope token ls` lists them",
            )  # fmt: skip
        text = PREFIX + secrets.token_urlsafe(_TEXT_BYTES) if text is None else self._checked_text(text)
        row = ApiToken(
            name=name, scope=scope, secret_hash=hash_secret(text), created_at=now, created_by=who, expires_at=expires_at
        )
        self._session.add(row)
        end = "" if expires_at is None else f", until {expires_at.isoformat(timespec='seconds')}"
        AuditRepository(self._session).append(
            AuditAction.TOKEN_CREATED, who=who, subject=name, detail=f"scope {scope}{end}"
        )
        return row, text

    def keep(self, name: str, scope: TokenScope, *, who: str, text: str) -> tuple[ApiToken, bool]:
        """Make a token of this text unless it is there already, as whatever starts a service does each time.

        Returns:
            Its row, and whether it is new.
        Raises:
            InvalidInput: as `create`.
            Conflict: the name or the text is another token's, or this one was made for another scope or is worthless
                by now: one that somebody has revoked does not come back by a restart.
        """
        row = self._named(name.strip())
        if row is None:
            return self.create(name, scope, who=who, text=text)[0], True
        if row.secret_hash != hash_secret(text) or row.scope is not scope or self.identify(text) is None:
            raise Conflict(
                f"there is a token {row.name!r} already, of another text or scope, or revoked or expired",
                field="name", value=row.name, remedy="give another name; `muonscope token ls` lists them",
            )  # fmt: skip
        return row, False

    def revoke(self, name: str, *, who: str) -> ApiToken:
        """Make a token, and the sessions that were opened with it, worthless from now on; once revoked, it stays so.

        Raises:
            NotFound: there is none of this name.
        """
        row = self._named(name)
        if row is None:
            raise NotFound(
                f"there is no token {name!r}", field="name", value=name, remedy="`muonscope token ls` lists them"
            )
        if row.revoked_at is None:
            row.revoked_at = read_clock(self._session)
            self._session.execute(delete(WebSession).where(WebSession.token_id == row.id))
            AuditRepository(self._session).append(AuditAction.TOKEN_REVOKED, who=who, subject=row.name)
        return row

    def list(self) -> Sequence[ApiToken]:
        """List all tokens, revoked and expired ones too, oldest first."""
        return self._session.scalars(select(ApiToken).order_by(ApiToken.id)).all()

    def count_usable(self) -> int:
        query = select(func.count()).select_from(ApiToken).where(*self._usable(read_clock(self._session)))
        return self._session.scalars(query).one()

    def identify(self, text: str) -> Identity | None:
        """Say whom a token's text proves; None where it proves nobody, any more or at all."""
        # Looked up by hash: the time it takes tells of the hash at most, and a hash leads to no token.
        now = read_clock(self._session)
        query = select(ApiToken).where(ApiToken.secret_hash == hash_secret(text), *self._usable(now))
        row = self._session.scalars(query).one_or_none()
        return None if row is None else _identity(row, now)

    def note_use(self, token_id: int) -> None:
        row = self._session.get(ApiToken, token_id)
        if row is not None:
            row.last_used_at = read_clock(self._session)

    # -- the dashboard's sessions -----------------------------------------------------------------------------------

    def open_session(self, identity: Identity) -> str:
        """Open a session for a token's bearer and return its cookie's value; expired ones of anybody go."""
        now = read_clock(self._session)
        self._session.execute(delete(WebSession).where(WebSession.expires_at <= now))
        secret = secrets.token_urlsafe(32)
        self._session.add(
            WebSession(
                secret_hash=hash_secret(secret), token_id=identity.token_id, created_at=now,
                expires_at=now + timedelta(days=SESSION_DAYS),
            )
        )  # fmt: skip
        return secret

    def identify_session(self, secret: str) -> Identity | None:
        """Say whom a session's cookie proves; None where the session or its token has ended."""
        now = read_clock(self._session)
        query = (
            select(WebSession)
            .join(ApiToken, ApiToken.id == WebSession.token_id)
            .where(WebSession.secret_hash == hash_secret(secret), WebSession.expires_at > now, *self._usable(now))
            .options(joinedload(WebSession.token))
        )
        row = self._session.scalars(query).one_or_none()
        return None if row is None else _identity(row.token, now)

    def close_session(self, secret: str) -> None:
        self._session.execute(delete(WebSession).where(WebSession.secret_hash == hash_secret(secret)))

    def _named(self, name: str) -> ApiToken | None:
        return self._session.scalars(select(ApiToken).where(ApiToken.name == storable_text(name))).one_or_none()

    def _checked_text(self, text: str) -> str:
        if not TEXT.fullmatch(text):
            # What it is instead may be a secret of another kind: it is not repeated.
            raise InvalidInput(
                f"a token is {PREFIX} and at least 43 letters, digits, - or _, as 32 random bytes give", field="text",
                value="<hidden>", remedy=_REMEDY,
            )  # fmt: skip
        query = select(ApiToken.name).where(ApiToken.secret_hash == hash_secret(text))
        owner = self._session.scalars(query).one_or_none()
        if owner is not None:
            raise Conflict(
                f"this token is {owner!r} already", field="text", value="<hidden>",
                remedy=_REMEDY,
            )  # fmt: skip
        return text

    @staticmethod
    def _usable(now: datetime) -> tuple[ColumnElement[bool], ...]:
        return ApiToken.revoked_at.is_(None), or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > now)


def _identity(row: ApiToken, now: datetime) -> Identity:
    is_stale = row.last_used_at is None or now - row.last_used_at > _USED_EVERY
    return Identity(row.id, row.name, row.scope, is_stale)
