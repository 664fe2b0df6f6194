"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}

revision: str = ${repr(up_revision)}
down_revision: str | None = ${repr(down_revision)}
branch_labels: str | Sequence[str] | None = ${repr(branch_labels)}
depends_on: str | Sequence[str] | None = ${repr(depends_on)}


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Wait briefly for the tables: a long wait would hold up everyone behind it.
        op.execute("SET LOCAL lock_timeout = '5s'")
    ${upgrades if upgrades else "pass"}
