"""Users' tokens, the dashboard's sessions, and the audit log.

Revision ID: 0007
Revises: 0006
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")
    op.create_table(
        "api_token",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "scope",
            sa.Enum("read", "submit", "admin", name="scope", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("expires_at", TIME, nullable=True),
        sa.Column("revoked_at", TIME, nullable=True),
        sa.Column("last_used_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_token"),
        sa.UniqueConstraint("name", name="uq_api_token_name"),
        sa.UniqueConstraint("secret_hash", name="uq_api_token_secret_hash"),
    )
    op.create_table(
        "web_session",
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("token_id", ROW_ID, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["token_id"], ["api_token.id"], name="fk_web_session_token_id_api_token", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("secret_hash", name="pk_web_session"),
    )
    op.create_index("ix_web_session_token_id", "web_session", ["token_id"])
    op.create_table(
        "audit_entry",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entry"),
        sqlite_autoincrement=True,
    )
