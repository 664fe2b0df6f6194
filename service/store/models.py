"""The schema: what is kept of every experiment, run, attempt and step.

    experiment ─< run ─< attempt ─< step, block, parameter_block, system_load, nonfinite_event
                   │  └< event            └< attempt_log
                   └─ run_summary, run_tag, parameter, queue_entry, checkpoint, mirror

    queue_state, queue_limit, leadership ─ controller
    alert ─< alert_delivery
    api_token ─< web_session; audit_entry

A non-finite scalar is stored as NULL with its kind in the row's `nonfinite_mask`, on both databases: SQLite keeps no
NaN at all, and one representation is one truth. NULL with mask 0 is "not measured". The view `step_current` shows,
of every step that several attempts recorded, the newest attempt's row.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    DDL,
    CheckConstraint,
    ForeignKey,
    Index,
    String,
    UniqueConstraint,
    event,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column, relationship

from muonscope.contract.status import (
    AttemptStatus,
    FailureKind,
    Implementation,
    MomentumUnit,
    ParameterRoute,
    RunStatus,
    StepOrdering,
    Verdict,
)
from service.store.access_models import ApiToken, AuditEntry, WebSession
from service.store.alert_models import Alert, AlertDelivery
from service.store.base import Base
from service.store.control_models import Controller, Leadership, QueueLimit, QueueState
from service.store.derived_models import Block, Mirror, ParameterBlock
from service.store.types import RowId, StoredText, words

STEP_CURRENT = """
CREATE VIEW step_current AS
SELECT attempt.run_id AS run_id, attempt.number AS attempt, step.*
FROM step JOIN attempt ON attempt.id = step.attempt_id
WHERE NOT EXISTS (
    SELECT 1 FROM step AS newer JOIN attempt AS newer_attempt ON newer_attempt.id = newer.attempt_id
    WHERE newer_attempt.run_id = attempt.run_id AND newer_attempt.number > attempt.number
      AND newer.step = step.step AND newer.rank = step.rank
)
"""


class Experiment(Base):
    """A question: a base spec and the fields that vary over it."""

    __tablename__ = "experiment"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str]
    builtin: Mapped[str | None] = mapped_column(String(100))
    """The built-in experiment this is one of; null for a user's own matrix."""
    base: Mapped[dict[str, Any]]
    matrix: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]

    runs: Mapped[list["Run"]] = relationship(back_populates="experiment", lazy="raise", order_by="Run.position")


class Run(Base):
    """One immutable spec and where it stands."""

    __tablename__ = "run"
    __table_args__ = (
        CheckConstraint("(idempotency_key IS NULL) = (request_hash IS NULL)", name="idempotency"),
        CheckConstraint("(verdict IS NULL) = (verdict_evidence IS NULL)", name="verdict_has_evidence"),
        # The queue: highest priority first, oldest first among equals.
        Index(
            "ix_run_queue",
            "priority",
            "id",
            postgresql_where=text("status = 'queued'"),
            sqlite_where=text("status = 'queued'"),
        ),
        Index("ix_run_status_id", "status", "id"),
        # The table's own order: its first page is read, not sorted.
        Index("ix_run_created_at_id", "created_at", "id"),
        Index("ix_run_experiment_id_position", "experiment_id", "position"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    experiment_id: Mapped[int | None] = mapped_column(ForeignKey("experiment.id", ondelete="SET NULL"))
    position: Mapped[int | None]
    """The run's place in its experiment's matrix."""
    spec: Mapped[dict[str, Any]]
    fingerprint: Mapped[str] = mapped_column(String(64), index=True)
    idempotency_key: Mapped[str | None] = mapped_column(StoredText, unique=True)
    request_hash: Mapped[str | None] = mapped_column(String(64))

    # What of the spec the run table filters and sorts on.
    name: Mapped[str] = mapped_column(StoredText, index=True)
    task: Mapped[str] = mapped_column(StoredText)
    step_ordering: Mapped[StepOrdering] = mapped_column(words(StepOrdering, "step_ordering"))
    implementation: Mapped[Implementation] = mapped_column(words(Implementation, "implementation"))
    zero_stage: Mapped[int]
    world_size: Mapped[int]
    steps: Mapped[int]
    initial_scale: Mapped[float | None]
    """The first loss scale; null where precision has none."""
    priority: Mapped[int]

    status: Mapped[RunStatus] = mapped_column(words(RunStatus, "status"))
    waiting_reason: Mapped[str | None]
    stop_requested: Mapped[bool] = mapped_column(default=False)
    epoch: Mapped[int] = mapped_column(default=0)
    """The newest attempt's: whatever comes with an older one is fenced."""
    failure_kind: Mapped[FailureKind | None] = mapped_column(words(FailureKind, "failure_kind"))
    failure_rank: Mapped[int | None]
    failure_step: Mapped[int | None]
    failure_message: Mapped[str | None]
    verdict: Mapped[Verdict | None] = mapped_column(words(Verdict, "verdict"))
    verdict_step: Mapped[int | None]
    verdict_parameter: Mapped[str | None]
    verdict_evidence: Mapped[str | None]
    findings: Mapped[list[Any]] = mapped_column(default=list)
    """Every verdict and lesser finding the record supports, gravest first: {name, step, parameter, evidence}."""
    revision: Mapped[int] = mapped_column(index=True)
    """Grows over all runs with every change to one: what a live view asks for."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    submitted_by: Mapped[str | None]
    """Who submitted it, as they said or as their token proves; null where nobody said."""

    experiment: Mapped[Experiment | None] = relationship(back_populates="runs", lazy="raise")
    attempts: Mapped[list["Attempt"]] = relationship(
        back_populates="run", lazy="raise", order_by="Attempt.number", passive_deletes=True
    )
    summary: Mapped["RunSummary"] = relationship(lazy="raise", passive_deletes=True)
    tags: Mapped[list["RunTag"]] = relationship(lazy="raise", passive_deletes=True, order_by="RunTag.position")


class RunTag(Base):
    __tablename__ = "run_tag"
    __table_args__ = (Index("ix_run_tag_tag", "tag"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    tag: Mapped[str]


class RunSummary(Base):
    """All that the run table reads of a run's record, kept in the transaction that stores the steps.

    Its counts are of the record up to the step that the run came to: what an attempt that was lost recorded beyond the
    last step of the one that came after it has not happened to the run.
    """

    __tablename__ = "run_summary"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    steps: Mapped[int] = mapped_column(default=0)
    discarded: Mapped[int] = mapped_column(default=0)
    overflows: Mapped[int] = mapped_column(default=0)
    last_step: Mapped[int | None]
    final_loss_scale: Mapped[float | None]
    last_loss: Mapped[float | None]
    last_momentum_norm: Mapped[float | None]
    max_weight_motion: Mapped[float | None]
    nonfinite_mask: Mapped[int] = mapped_column(default=0)
    """Two bits each, for the four scalars above in their order."""
    momentum_finite: Mapped[bool | None]
    parameters_moved: Mapped[int | None]
    parameters_total: Mapped[int | None]
    muon_parameters_moved: Mapped[int | None]
    muon_parameters_total: Mapped[int | None]


class Attempt(Base):
    """One execution of a run: one Ray job, whose submission id is `submission_id`."""

    __tablename__ = "attempt"
    __table_args__ = (
        UniqueConstraint("run_id", "number"),
        UniqueConstraint("run_id", "epoch"),
        CheckConstraint("number >= 1", name="number"),
        CheckConstraint("stored_steps >= 0 AND next_step >= first_step", name="progress"),
        # One live attempt a run: two would write one record.
        Index(
            "uq_attempt_live",
            "run_id",
            unique=True,
            postgresql_where=text("status IN ('pending', 'running')"),
            sqlite_where=text("status IN ('pending', 'running')"),
        ),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    number: Mapped[int]
    submission_id: Mapped[str] = mapped_column(String(64), unique=True)
    ray_job_id: Mapped[str | None]
    status: Mapped[AttemptStatus] = mapped_column(words(AttemptStatus, "status"))
    epoch: Mapped[int]
    enrolment_token_hash: Mapped[str] = mapped_column(String(64))
    enrolled_at: Mapped[datetime | None]
    """When the one-use enrolment token was used."""
    token_hash: Mapped[str | None] = mapped_column(String(64))
    heartbeat_at: Mapped[datetime | None]
    lease_expires_at: Mapped[datetime]
    """On the database's clock; a live attempt past it may be declared lost."""
    steps_recorded: Mapped[int] = mapped_column(default=0)
    """As the last heartbeat counted them, stored here or still in the spool."""
    silent_ranks: Mapped[list[Any]] = mapped_column(default=list)
    phases: Mapped[dict[str, Any]] = mapped_column(default=dict)
    environment: Mapped[dict[str, Any]] = mapped_column(default=dict)
    ranks: Mapped[list[Any]] = mapped_column(default=list)
    momentum_unit: Mapped[MomentumUnit | None] = mapped_column(words(MomentumUnit, "momentum_unit"))
    data_hash: Mapped[str | None]
    initial_parameters_hash: Mapped[str | None]
    resolved_ds_config: Mapped[dict[str, Any] | None]
    final: Mapped[dict[str, Any] | None]
    failure_kind: Mapped[FailureKind | None] = mapped_column(words(FailureKind, "failure_kind"))
    failure_rank: Mapped[int | None]
    failure_step: Mapped[int | None]
    failure_message: Mapped[str | None]
    first_step: Mapped[int] = mapped_column(default=0)
    """The step the attempt begins at: above 0 it resumes from a checkpoint."""
    declared_steps: Mapped[int | None]
    stored_steps: Mapped[int] = mapped_column(default=0)
    """Rows of rank 0 that are stored."""
    next_step: Mapped[int] = mapped_column(default=0)
    """The step after the newest stored one of rank 0."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    stepped_at: Mapped[datetime | None]
    """When the newest of its steps was stored; null before the first."""

    run: Mapped[Run] = relationship(back_populates="attempts", lazy="raise")


class Parameter(Base):
    """One parameter of a run's model, at its place in the model's own order."""

    __tablename__ = "parameter"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    shape: Mapped[list[Any]]
    route: Mapped[ParameterRoute] = mapped_column(words(ParameterRoute, "route"))
    reason: Mapped[str]


class Step(Base):
    """One attempted optimizer step as one rank recorded it. Written in bulk by `steps.py`, never as objects.

    The scalars and counts stand in wire order. The norms come last: SQLite then reads a long row's scalars without
    its overflow pages.
    """

    __tablename__ = "step"
    __table_args__ = ({"sqlite_with_rowid": False},)

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    overflow: Mapped[bool]
    discarded: Mapped[bool]
    nonfinite_mask: Mapped[int]
    """Two bits for each scalar in wire order: 0 finite or not measured, 1 NaN, 2 +infinity, 3 -infinity."""
    loss_scale_before: Mapped[float | None]
    loss_scale_after: Mapped[float | None]
    loss: Mapped[float | None]
    lr: Mapped[float | None]
    grad_norm: Mapped[float | None]
    update_norm: Mapped[float | None]
    momentum_norm: Mapped[float | None]
    step_time_s: Mapped[float | None]
    largest_parameter: Mapped[int | None]
    nonfinite_parameters: Mapped[int | None]
    ns_calls: Mapped[int | None]
    tokens: Mapped[int | None]
    momentum_norms: Mapped[bytes | None]
    """Every trainable parameter's momentum norm after the step, float32 little-endian."""


class SystemLoad(Base):
    """What one rank's process, its node and its GPU were busy with at one moment."""

    __tablename__ = "system_load"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(primary_key=True)
    """On the rank's clock."""
    cpu_percent: Mapped[float | None]
    """Of one core, the process's own threads together, since the sample before."""
    memory_bytes: Mapped[int | None]
    """The process's resident memory."""
    node_cpu_percent: Mapped[float | None]
    node_memory_bytes: Mapped[int | None]
    node_memory_total_bytes: Mapped[int | None]
    gpu_percent: Mapped[float | None]
    gpu_memory_bytes: Mapped[int | None]
    """In use on the device, by whomever."""
    gpu_memory_total_bytes: Mapped[int | None]


class NonfiniteEvent(Base):
    """A series of rank 0 that turned non-finite, changed its kind or became finite again, at this step."""

    __tablename__ = "nonfinite_event"
    __table_args__ = (
        CheckConstraint("kind BETWEEN 0 AND 3", name="kind"),
        UniqueConstraint("attempt_id", "scalar", "parameter", "step"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"))
    scalar: Mapped[str] = mapped_column(String(32))
    parameter: Mapped[int]
    """The parameter's index, or -1 where the series is the whole model's."""
    step: Mapped[int]
    kind: Mapped[int]
    """0 finite again, 1 NaN, 2 +infinity, 3 -infinity."""


class Event(Base):
    """One thing that happened to a run, with who did it and why. Rows are only ever added."""

    __tablename__ = "event"
    __table_args__ = (Index("ix_event_run_id_id", "run_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    attempt: Mapped[int | None]
    """The attempt's number."""
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(32))
    """`run_status`, `attempt_status`, `alarm`, `gap`, or another word of the one who tells."""
    from_status: Mapped[str | None] = mapped_column(String(32))
    to_status: Mapped[str | None] = mapped_column(String(32))
    who: Mapped[str]
    why: Mapped[str]
    detail: Mapped[dict[str, Any] | None]

    run: Mapped[Run | None] = relationship(lazy="raise")


class QueueEntry(Base):
    """A run that wants GPUs or holds them: all that a tick reads of it. Gone once the run has ended."""

    __tablename__ = "queue_entry"
    __table_args__ = (Index("ix_queue_entry_is_live_rank_run_id", "is_live", "rank", "run_id"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    is_live: Mapped[bool]
    """Whether it has an attempt: false in the queue, true from pending on."""
    rank: Mapped[float]
    """Its place: the smallest starts first. The Unix time of submission, less `aging_s` for each point of priority:
    a run that has waited `aging_s` longer stands level with one of a point more, and the order never changes."""
    gpus: Mapped[float]
    owner: Mapped[str]
    """Whose limits it counts against; empty where nobody said."""
    queued_at: Mapped[datetime]
    failed_at: Mapped[datetime | None]
    """When its last attempt ended by no fault of the run: the pause before the next one begins there."""
    attempts: Mapped[int]
    reason: Mapped[str | None]
    """The run's `waiting_reason`, as last written."""


class Checkpoint(Base):
    """A complete checkpoint that is still there, as the workers last said."""

    __tablename__ = "checkpoint"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The first step to attempt after loading it."""
    attempt: Mapped[int]
    """The number of the attempt that wrote it."""
    total_bytes: Mapped[int]
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]


class AttemptLog(Base):
    """A piece of what a rank or the driver printed. The middle of a long log is left out."""

    __tablename__ = "attempt_log"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """-1 is the driver."""
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The piece's first byte in what was printed."""
    stop: Mapped[int]
    text: Mapped[str]


event.listen(Base.metadata, "after_create", DDL(STEP_CURRENT))  # type: ignore[no-untyped-call]
event.listen(Base.metadata, "before_drop", DDL("DROP VIEW IF EXISTS step_current"))  # type: ignore[no-untyped-call]

__all__ = [
    "STEP_CURRENT",
    "Alert",
    "AlertDelivery",
    "ApiToken",
    "Attempt",
    "AttemptLog",
    "AuditEntry",
    "Base",
    "Block",
    "Checkpoint",
    "Controller",
    "Event",
    "Experiment",
    "Leadership",
    "Mirror",
    "NonfiniteEvent",
    "Parameter",
    "ParameterBlock",
    "QueueEntry",
    "QueueLimit",
    "QueueState",
    "Run",
    "RunSummary",
    "RunTag",
    "Step",
    "SystemLoad",
    "WebSession",
]
