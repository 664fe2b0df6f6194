"""The audit log, for those who guard the service."""

from datetime import datetime
from typing import Annotated

from fastapi import Query

from service.api.dependencies import DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, Out
from service.store.audit import AuditAction, AuditRepository

router = Router(tags=["access"], responses=PROBLEMS)


class AuditEntryOut(Out):
    id: int
    at: datetime
    action: AuditAction
    who: str
    """The name of the caller's token; where none was shown, who they said they are."""
    subject: str | None
    detail: str
    address: str | None


class AuditOut(Out):
    entries: list[AuditEntryOut]
    next_cursor: int | None


@router.get("/audit", summary="List who did what, and who was refused, newest first")
def read_audit(
    database: DatabaseDependency,
    cursor: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditOut:
    with database.read() as session:
        found = AuditRepository(session).page(before=cursor, limit=limit + 1)
        entries = [
            AuditEntryOut(
                id=row.id, at=row.at, action=AuditAction(row.action), who=row.who, subject=row.subject,
                detail=row.detail, address=row.address,
            )
            for row in found[:limit]
        ]  # fmt: skip
    return AuditOut(entries=entries, next_cursor=entries[-1].id if len(found) > limit else None)
