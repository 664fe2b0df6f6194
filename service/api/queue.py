"""The queue: whether runs start, who may hold how many GPUs; each change has its author and reason in the events."""

from datetime import datetime
from typing import Annotated, Final

from fastapi import Body, Path
from pydantic import BaseModel, ConfigDict, Field

from muonscope.contract.run_spec import Real
from muonscope.contract.status import LimitKind, QueueMode
from service.api.dependencies import CallerDependency, Controller, ControllerDependency, DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, Out
from service.store.audit import AuditAction, AuditRepository
from service.store.queue import QueueRepository
from service.store.session import Database

router = Router(prefix="/queue", tags=["queue"], responses=PROBLEMS)

LimitName = Annotated[str, Path(max_length=200, description="A user or a tag; * is each one without its own limit.")]
_MOST_GPUS: Final = 1_000_000


class Reason(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    why: str = Field("", max_length=2000)
    """Shown to everyone who waits."""


class LimitIn(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_gpus: Real = Field(ge=0, le=_MOST_GPUS, allow_inf_nan=False)
    """Held at once by all runs of this user, or with this tag."""


class LimitOut(Out):
    kind: LimitKind
    name: str
    max_gpus: float
    who: str
    changed_at: datetime


class QueueOut(Out):
    mode: QueueMode
    who: str
    """Who set the mode."""
    why: str
    changed_at: datetime
    waiting: int
    holding: int
    """Runs that hold GPUs or are about to."""
    is_drained: bool
    """Draining, and no run holds a GPU any more."""
    limits: list[LimitOut]


@router.get("", summary="Read whether runs start, how many wait, and the limits")
def read_queue(database: DatabaseDependency) -> QueueOut:
    with database.read() as session:
        return _present(QueueRepository(session))


@router.post("/pause", summary="Start nothing more; submissions are taken, live runs go on")
def pause(
    caller: CallerDependency, database: DatabaseDependency, controller: ControllerDependency,
    reason: Annotated[Reason, Body()] = Reason(),  # noqa: B008 (frozen in effect: never written to)
) -> QueueOut:  # fmt: skip
    return _set(QueueMode.PAUSED, caller, reason, database, controller)


@router.post("/resume", summary="Start runs again")
def resume(
    caller: CallerDependency, database: DatabaseDependency, controller: ControllerDependency,
    reason: Annotated[Reason, Body()] = Reason(),  # noqa: B008
) -> QueueOut:  # fmt: skip
    return _set(QueueMode.OPEN, caller, reason, database, controller)


@router.post("/drain", summary="Start nothing more and take no submissions; live runs go on to their end")
def drain(
    caller: CallerDependency, database: DatabaseDependency, controller: ControllerDependency,
    reason: Annotated[Reason, Body()] = Reason(),  # noqa: B008
) -> QueueOut:  # fmt: skip
    return _set(QueueMode.DRAINING, caller, reason, database, controller)


@router.put("/limits/{kind}/{name:path}", summary="Let a user or a tag hold at most so many GPUs")
def set_limit(
    kind: LimitKind, name: LimitName, limit: LimitIn, caller: CallerDependency, database: DatabaseDependency,
    controller: ControllerDependency,
) -> QueueOut:  # fmt: skip
    with database.write() as session:
        queue = QueueRepository(session)
        queue.set_limit(kind, name, limit.max_gpus, who=caller)
        AuditRepository(session).append(
            AuditAction.LIMIT_SET, who=caller, subject=f"{kind} {name}", detail=f"at most {limit.max_gpus:g} GPUs"
        )
        shown = _present(queue)
    controller.wake()
    return shown


@router.delete("/limits/{kind}/{name:path}", summary="Take a limit away")
def remove_limit(
    kind: LimitKind, name: LimitName, caller: CallerDependency, database: DatabaseDependency,
    controller: ControllerDependency,
) -> QueueOut:  # fmt: skip
    with database.write() as session:
        queue = QueueRepository(session)
        queue.remove_limit(kind, name, who=caller)
        AuditRepository(session).append(AuditAction.LIMIT_SET, who=caller, subject=f"{kind} {name}", detail="no limit")
        session.flush()
        shown = _present(queue)
    controller.wake()
    return shown


def _set(mode: QueueMode, caller: str, reason: Reason, database: Database, controller: Controller) -> QueueOut:
    with database.write() as session:
        queue = QueueRepository(session)
        if queue.set_mode(mode, who=caller, why=reason.why):
            AuditRepository(session).append(AuditAction.QUEUE_MODE_SET, who=caller, subject=mode, detail=reason.why)
        shown = _present(queue)
    controller.wake()
    return shown


def _present(queue: QueueRepository) -> QueueOut:
    state, (waiting, holding) = queue.state(), queue.counts()
    return QueueOut(
        mode=state.mode,
        who=state.who,
        why=state.why,
        changed_at=state.changed_at,
        waiting=waiting,
        holding=holding,
        is_drained=state.mode is QueueMode.DRAINING and holding == 0,
        limits=[
            LimitOut(kind=row.kind, name=row.name, max_gpus=row.max_gpus, who=row.who, changed_at=row.changed_at)
            for row in queue.limits()
        ],
    )
