"""An index for the run table's own order, newest first.

Revision ID: 0008
Revises: 0007
"""

from collections.abc import Sequence

from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")
    op.create_index("ix_run_created_at_id", "run", ["created_at", "id"])


def downgrade() -> None:
    op.drop_index("ix_run_created_at_id", table_name="run")
