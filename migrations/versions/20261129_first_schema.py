"""The first schema: experiments, runs, attempts, steps and what is derived from them.

Revision ID: 0001
Revises:
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# A migration keeps its own copy of every type and word: the models move on, it does not.
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON()
TIME = sa.DateTime(timezone=True)
FAILURE_KINDS = (
    "loss_scale_exhausted",
    "no_progress",
    "task_error",
    "config_refused",
    "worker_died",
    "worker_stalled",
    "out_of_memory",
    "job_lost",
    "setup_failed",
    "record_incomplete",
    "disk_full",
    "checkpoint_unusable",
)
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


def _words(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=32)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Wait briefly for the tables: a long wait would hold up everyone behind it.
        op.execute("SET LOCAL lock_timeout = '5s'")
    _create_experiment()
    _create_run()
    _create_attempt()
    _create_event()
    _create_parameter()
    _create_run_summary()
    _create_run_tag()
    _create_nonfinite_event()
    _create_step()
    op.execute(STEP_CURRENT)


def _create_experiment() -> None:
    op.create_table(
        "experiment",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("builtin", sa.String(length=100), nullable=True),
        sa.Column("base", JSON, nullable=False),
        sa.Column("matrix", JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_experiment"),
        sa.UniqueConstraint("uid", name="uq_experiment_uid"),
    )


def _create_run() -> None:
    op.create_table(
        "run",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("experiment_id", ROW_ID, nullable=True),
        sa.Column("position", sa.BigInteger(), nullable=True),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_hash", sa.String(length=64), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column(
            "step_ordering",
            _words("step_ordering", "master", "per_tensor", "inverted", "precheck", "deferred", "ordered"),
            nullable=False,
        ),
        sa.Column(
            "implementation",
            _words("implementation", "muon_core", "deepspeed"),
            nullable=False,
        ),
        sa.Column("zero_stage", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("initial_scale", sa.Double(), nullable=True),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column(
            "status",
            _words("status", "queued", "pending", "running", "succeeded", "failed", "stopped"),
            nullable=False,
        ),
        sa.Column("waiting_reason", sa.Text(), nullable=True),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column(
            "failure_kind",
            _words("failure_kind", *FAILURE_KINDS),
            nullable=True,
        ),
        sa.Column("failure_rank", sa.BigInteger(), nullable=True),
        sa.Column("failure_step", sa.BigInteger(), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column(
            "verdict",
            _words("verdict", "dies", "poisoned", "diverged", "stalled", "absorbed", "inconclusive", "trains"),
            nullable=True,
        ),
        sa.Column("verdict_step", sa.BigInteger(), nullable=True),
        sa.Column("verdict_parameter", sa.Text(), nullable=True),
        sa.Column("verdict_evidence", sa.Text(), nullable=True),
        sa.Column("findings", JSON, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("finished_at", TIME, nullable=True),
        sa.CheckConstraint("(idempotency_key IS NULL) = (request_hash IS NULL)", name=op.f("ck_run_idempotency")),
        sa.CheckConstraint("(verdict IS NULL) = (verdict_evidence IS NULL)", name=op.f("ck_run_verdict_has_evidence")),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiment.id"], name="fk_run_experiment_id_experiment", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.UniqueConstraint("idempotency_key", name="uq_run_idempotency_key"),
        sa.UniqueConstraint("uid", name="uq_run_uid"),
    )
    op.create_index("ix_run_experiment_id_position", "run", ["experiment_id", "position"])
    op.create_index("ix_run_fingerprint", "run", ["fingerprint"])
    op.create_index("ix_run_name", "run", ["name"])
    op.create_index(
        "ix_run_queue",
        "run",
        ["priority", "id"],
        postgresql_where=sa.text("status = 'queued'"),
        sqlite_where=sa.text("status = 'queued'"),
    )
    op.create_index("ix_run_revision", "run", ["revision"])
    op.create_index("ix_run_status_id", "run", ["status", "id"])


def _create_attempt() -> None:
    op.create_table(
        "attempt",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("run_id", ROW_ID, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("submission_id", sa.String(length=64), nullable=False),
        sa.Column("ray_job_id", sa.Text(), nullable=True),
        sa.Column(
            "status",
            _words("status", "pending", "running", "succeeded", "failed", "stopped", "lost"),
            nullable=False,
        ),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("enrolment_token_hash", sa.String(length=64), nullable=False),
        sa.Column("enrolled_at", TIME, nullable=True),
        sa.Column("token_hash", sa.String(length=64), nullable=True),
        sa.Column("heartbeat_at", TIME, nullable=True),
        sa.Column("lease_expires_at", TIME, nullable=False),
        sa.Column("steps_recorded", sa.BigInteger(), nullable=False),
        sa.Column("silent_ranks", JSON, nullable=False),
        sa.Column("phases", JSON, nullable=False),
        sa.Column("environment", JSON, nullable=False),
        sa.Column("ranks", JSON, nullable=False),
        sa.Column(
            "momentum_unit",
            _words("momentum_unit", "unscaled", "loss_scaled"),
            nullable=True,
        ),
        sa.Column("data_hash", sa.Text(), nullable=True),
        sa.Column("initial_parameters_hash", sa.Text(), nullable=True),
        sa.Column("resolved_ds_config", JSON, nullable=True),
        sa.Column("final", JSON, nullable=True),
        sa.Column(
            "failure_kind",
            _words("failure_kind", *FAILURE_KINDS),
            nullable=True,
        ),
        sa.Column("failure_rank", sa.BigInteger(), nullable=True),
        sa.Column("failure_step", sa.BigInteger(), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("declared_steps", sa.BigInteger(), nullable=True),
        sa.Column("stored_steps", sa.BigInteger(), nullable=False),
        sa.Column("next_step", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("finished_at", TIME, nullable=True),
        sa.CheckConstraint("number >= 1", name=op.f("ck_attempt_number")),
        sa.CheckConstraint("stored_steps >= 0 AND next_step >= first_step", name=op.f("ck_attempt_progress")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_attempt_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_attempt"),
        sa.UniqueConstraint("run_id", "epoch", name="uq_attempt_run_id_epoch"),
        sa.UniqueConstraint("run_id", "number", name="uq_attempt_run_id_number"),
        sa.UniqueConstraint("submission_id", name="uq_attempt_submission_id"),
    )
    op.create_index(
        "uq_attempt_live",
        "attempt",
        ["run_id"],
        unique=True,
        postgresql_where=sa.text("status IN ('pending', 'running')"),
        sqlite_where=sa.text("status IN ('pending', 'running')"),
    )


def _create_event() -> None:
    op.create_table(
        "event",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("run_id", ROW_ID, nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=True),
        sa.Column("at", TIME, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("from_status", sa.String(length=32), nullable=True),
        sa.Column("to_status", sa.String(length=32), nullable=True),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("detail", JSON, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_event_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_event"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_event_run_id_id", "event", ["run_id", "id"])


def _create_parameter() -> None:
    op.create_table(
        "parameter",
        sa.Column("run_id", ROW_ID, nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("shape", JSON, nullable=False),
        sa.Column(
            "route",
            _words("route", "muon", "adamw", "frozen"),
            nullable=False,
        ),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_parameter_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "index", name="pk_parameter"),
    )


def _create_run_summary() -> None:
    op.create_table(
        "run_summary",
        sa.Column("run_id", ROW_ID, nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("discarded", sa.BigInteger(), nullable=False),
        sa.Column("overflows", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("final_loss_scale", sa.Double(), nullable=True),
        sa.Column("last_loss", sa.Double(), nullable=True),
        sa.Column("last_momentum_norm", sa.Double(), nullable=True),
        sa.Column("max_weight_motion", sa.Double(), nullable=True),
        sa.Column("nonfinite_mask", sa.BigInteger(), nullable=False),
        sa.Column("momentum_finite", sa.Boolean(), nullable=True),
        sa.Column("parameters_moved", sa.BigInteger(), nullable=True),
        sa.Column("parameters_total", sa.BigInteger(), nullable=True),
        sa.Column("muon_parameters_moved", sa.BigInteger(), nullable=True),
        sa.Column("muon_parameters_total", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_run_summary_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_run_summary"),
    )


def _create_run_tag() -> None:
    op.create_table(
        "run_tag",
        sa.Column("run_id", ROW_ID, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_run_tag_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "position", name="pk_run_tag"),
    )
    op.create_index("ix_run_tag_tag", "run_tag", ["tag"])


def _create_nonfinite_event() -> None:
    op.create_table(
        "nonfinite_event",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("scalar", sa.String(length=32), nullable=False),
        sa.Column("parameter", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind BETWEEN 0 AND 3", name=op.f("ck_nonfinite_event_kind")),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempt.id"], name="fk_nonfinite_event_attempt_id_attempt", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_nonfinite_event"),
        sa.UniqueConstraint(
            "attempt_id",
            "scalar",
            "parameter",
            "step",
            name="uq_nonfinite_event_attempt_id_scalar_parameter_step",
        ),
    )


def _create_step() -> None:
    op.create_table(
        "step",
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("overflow", sa.Boolean(), nullable=False),
        sa.Column("discarded", sa.Boolean(), nullable=False),
        sa.Column("nonfinite_mask", sa.BigInteger(), nullable=False),
        sa.Column("loss_scale_before", sa.Double(), nullable=True),
        sa.Column("loss_scale_after", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("update_norm", sa.Double(), nullable=True),
        sa.Column("momentum_norm", sa.Double(), nullable=True),
        sa.Column("step_time_s", sa.Double(), nullable=True),
        sa.Column("largest_parameter", sa.BigInteger(), nullable=True),
        sa.Column("nonfinite_parameters", sa.BigInteger(), nullable=True),
        sa.Column("ns_calls", sa.BigInteger(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("momentum_norms", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_step_attempt_id_attempt", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("attempt_id", "step", "rank", name="pk_step"),
        sqlite_with_rowid=False,
    )
