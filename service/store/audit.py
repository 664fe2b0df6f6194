"""The audit log: what was done in whose name, and who was refused; added, never changed."""

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.store.access_models import AuditEntry
from service.store.types import read_clock


class AuditAction(StrEnum):
    """What is noted."""

    TOKEN_CREATED = "token_created"
    TOKEN_REVOKED = "token_revoked"
    SIGNED_IN = "signed_in"
    AUTHENTICATION_FAILED = "authentication_failed"
    ATTEMPT_ALARM = "attempt_alarm"
    """A used enrolment token came again, or an attempt's record contradicts itself."""
    RUN_STOPPED = "run_stopped"
    RUN_DELETED = "run_deleted"
    QUEUE_MODE_SET = "queue_mode_set"
    LIMIT_SET = "limit_set"


class AuditRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def append(
        self,
        action: AuditAction,
        *,
        who: str,
        subject: str | None = None,
        detail: str = "",
        address: str | None = None,
    ) -> AuditEntry:
        """Add one entry, in the caller's transaction."""
        row = AuditEntry(
            at=read_clock(self._session), action=action, who=who, subject=subject, detail=detail, address=address
        )
        self._session.add(row)
        return row

    def page(self, *, before: int | None = None, limit: int = 100) -> Sequence[AuditEntry]:
        """List entries, newest first, older than the id `before`."""
        query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditEntry.id < before)
        return self._session.scalars(query).all()
