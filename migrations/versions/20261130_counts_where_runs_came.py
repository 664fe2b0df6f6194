"""A run's counts end where it came to: those of runs that were tried again are counted anew.

Revision ID: 0009
Revises: 0008
"""

from collections.abc import Sequence

from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# A run's first attempt alone has no other whose steps it could leave out.
_COUNT_ANEW = """
UPDATE run_summary SET (steps, overflows, discarded) = (
    SELECT COUNT(*), COALESCE(SUM(CASE WHEN overflow THEN 1 ELSE 0 END), 0),
        COALESCE(SUM(CASE WHEN discarded THEN 1 ELSE 0 END), 0)
    FROM step_current
    WHERE step_current.run_id = run_summary.run_id AND step_current.rank = 0 AND step_current.step < (
        SELECT next_step FROM attempt
        WHERE attempt.run_id = run_summary.run_id AND stored_steps > 0 ORDER BY number DESC LIMIT 1
    )
)
WHERE run_id IN (SELECT run_id FROM attempt WHERE stored_steps > 0 GROUP BY run_id HAVING COUNT(*) > 1)
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute(_COUNT_ANEW)


def downgrade() -> None:
    """The counts of later attempts go on from these; there is nothing to take back."""
