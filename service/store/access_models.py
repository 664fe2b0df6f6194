"""The schema of who may ask: tokens, the dashboard's sessions, and what was done in whose name.

No secret is stored: of a token and of a session's cookie only the SHA-256 is, which suffices for secrets of 256 bits.
"""

from datetime import datetime

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column, relationship

from muonscope.contract.status import TokenScope
from service.store.base import Base
from service.store.types import RowId, StoredText, words


class ApiToken(Base):
    """A user's token. Its row stays when it is revoked: audit entries name it."""

    __tablename__ = "api_token"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    name: Mapped[str] = mapped_column(StoredText, unique=True)
    """Whose name events and audit entries carry."""
    scope: Mapped[TokenScope] = mapped_column(words(TokenScope, "scope"))
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    """Coarse: noted again only once it is an hour old."""


class WebSession(Base):
    """A browser that has shown a token: ends with the token, and by itself after some days."""

    __tablename__ = "web_session"
    __table_args__ = (Index("ix_web_session_token_id", "token_id"),)

    secret_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_id: Mapped[int] = mapped_column(ForeignKey("api_token.id", ondelete="CASCADE"))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]

    token: Mapped[ApiToken] = relationship(lazy="raise")


class AuditEntry(Base):
    """One thing that matters to whoever guards the service. Outlives the run that it is about; rows are only added."""

    __tablename__ = "audit_entry"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[datetime]
    action: Mapped[str] = mapped_column(String(32))
    who: Mapped[str]
    subject: Mapped[str | None]
    """What it was done to: a run's or an attempt's id, a token's name."""
    detail: Mapped[str]
    address: Mapped[str | None]
    """Where the request came from."""
