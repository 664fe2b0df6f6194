"""The queue as a table of its own, who leads, checkpoints, logs, and who submitted a run.

Revision ID: 0003
Revises: 0002
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
# What the service was set to by default when runs had no rank yet; it ranks them anew when it is set otherwise.
AGING_S = 600.0
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")
    op.add_column("run", sa.Column("submitted_by", sa.Text(), nullable=True))
    _create_queue()
    _create_controllers()
    _create_checkpoint()
    _create_attempt_log()
    _fill()


def _words(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=32)


def _create_queue() -> None:
    op.create_table(
        "queue_entry",
        sa.Column("run_id", ROW_ID, nullable=False),
        sa.Column("is_live", sa.Boolean(), nullable=False),
        sa.Column("rank", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("queued_at", TIME, nullable=False),
        sa.Column("failed_at", TIME, nullable=True),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_queue_entry_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_queue_entry"),
    )
    op.create_index("ix_queue_entry_is_live_rank_run_id", "queue_entry", ["is_live", "rank", "run_id"])
    op.create_table(
        "queue_state",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("mode", _words("mode", "open", "paused", "draining"), nullable=False),
        sa.Column("aging_s", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("changed_at", TIME, nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_queue_state_single")),
        sa.PrimaryKeyConstraint("id", name="pk_queue_state"),
    )
    op.create_table(
        "queue_limit",
        sa.Column("kind", _words("kind", "user", "tag"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("max_gpus", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("changed_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name="pk_queue_limit"),
    )


def _create_controllers() -> None:
    op.create_table(
        "controller",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_controller"),
    )
    op.create_table(
        "leadership",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.String(length=32), nullable=True),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_leadership_single")),
        sa.ForeignKeyConstraint(
            ["holder"], ["controller.id"], name="fk_leadership_holder_controller", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_leadership"),
    )


def _create_checkpoint() -> None:
    op.create_table(
        "checkpoint",
        sa.Column("run_id", ROW_ID, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_checkpoint_run_id_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_checkpoint"),
    )


def _create_attempt_log() -> None:
    op.create_table(
        "attempt_log",
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stop", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempt.id"], name="fk_attempt_log_attempt_id_attempt", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank", "start", name="pk_attempt_log"),
    )


def _fill() -> None:
    """Open the queue, and put into it every run that waits or holds GPUs now."""
    meta = sa.MetaData()
    state = sa.Table("queue_state", meta, sa.Column("id"), sa.Column("mode"), sa.Column("aging_s"), sa.Column("who"),
                     sa.Column("why"), sa.Column("changed_at", TIME))  # fmt: skip
    leadership = sa.Table("leadership", meta, sa.Column("id"), sa.Column("term"), sa.Column("expires_at", TIME))
    connection = op.get_bind()
    # SQLite's driver takes times without their zone; both databases hold UTC.
    is_sqlite = connection.dialect.name == "sqlite"
    epoch = EPOCH.replace(tzinfo=None) if is_sqlite else EPOCH
    connection.execute(
        state.insert().values(id=1, mode="open", aging_s=AGING_S, who="migration", why="made", changed_at=epoch)
    )
    connection.execute(leadership.insert().values(id=1, term=0, expires_at=epoch))
    rows = connection.execute(
        sa.text("SELECT id, status, priority, world_size, spec, created_at FROM run "
                "WHERE status IN ('queued', 'pending', 'running') ORDER BY id")
        .columns(created_at=TIME)
    ).all()  # fmt: skip
    attempts = connection.execute(sa.text("SELECT run_id, count(*) FROM attempt GROUP BY run_id"))
    counts = {row[0]: row[1] for row in attempts}
    entries = [_entry(row, counts.get(row.id, 0)) for row in rows]
    if entries:
        table = sa.Table("queue_entry", meta, *(sa.Column(name) for name in entries[0] if name != "queued_at"),
                         sa.Column("queued_at", TIME))  # fmt: skip
        connection.execute(table.insert(), entries)


def _entry(row: Any, attempts: int) -> dict[str, Any]:
    spec = json.loads(row.spec) if isinstance(row.spec, str) else row.spec
    at: datetime = row.created_at
    seconds = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    return {
        "run_id": row.id,
        "is_live": row.status != "queued",
        "rank": seconds - row.priority * AGING_S,
        "gpus": row.world_size * float((spec.get("resources") or {}).get("gpus_per_rank", 1.0)),
        "owner": "",
        "queued_at": at,
        "attempts": attempts,
    }
