"""Alerts and their deliveries, and when an attempt's newest step was stored.

Revision ID: 0004
Revises: 0003
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")
    op.add_column("attempt", sa.Column("stepped_at", TIME, nullable=True))
    _create_alert()
    _create_delivery()


def _words(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=32)


def _create_alert() -> None:
    op.create_table(
        "alert",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("kind", _words("kind", "verdict", "status", "discarded_share", "silence"), nullable=False),
        sa.Column("condition", sa.JSON(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=True),
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("seen_event", sa.BigInteger(), nullable=False),
        sa.Column("seen_revision", sa.BigInteger(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_alert"),
        sa.UniqueConstraint("uid", name="uq_alert_uid"),
    )


def _create_delivery() -> None:
    op.create_table(
        "alert_delivery",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("alert_id", ROW_ID, nullable=False),
        sa.Column("run_uid", sa.String(length=32), nullable=False),
        sa.Column("occurrence", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("status", _words("status", "pending", "delivered", "given_up"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("next_try_at", TIME, nullable=True),
        sa.Column("response_code", sa.BigInteger(), nullable=True),
        sa.Column("response", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=True),
        sa.CheckConstraint("(status = 'pending') = (next_try_at IS NOT NULL)", name=op.f("ck_alert_delivery_next_try")),
        sa.ForeignKeyConstraint(
            ["alert_id"], ["alert.id"], name="fk_alert_delivery_alert_id_alert", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_alert_delivery"),
        sa.UniqueConstraint("uid", name="uq_alert_delivery_uid"),
        sa.UniqueConstraint("alert_id", "run_uid", "occurrence", name="uq_alert_delivery_alert_id_run_uid_occurrence"),
    )
    op.create_index("ix_alert_delivery_alert_id_id", "alert_delivery", ["alert_id", "id"])
    op.create_index(
        "ix_alert_delivery_next_try_at",
        "alert_delivery",
        ["next_try_at"],
        postgresql_where=sa.text("status = 'pending'"),
        sqlite_where=sa.text("status = 'pending'"),
    )
