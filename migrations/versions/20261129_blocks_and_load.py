"""Blocks: long records summed up for charts, filled for the steps that are stored already; and the system's load.

Revision ID: 0002
Revises: 0001
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# A migration keeps its own copy of every type and word: the models move on, it does not.
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BLOCK_STEPS, BUCKET_STEPS = 480, 24
SERIES = (
    "loss_scale_before", "loss_scale_after", "loss", "lr", "grad_norm", "update_norm", "momentum_norm", "step_time_s",
    "largest_parameter", "nonfinite_parameters", "ns_calls", "tokens",
)  # fmt: skip
CHUNK = 500


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # Wait briefly for the tables: a long wait would hold up everyone behind it.
        op.execute("SET LOCAL lock_timeout = '5s'")
    block = op.create_table(
        "block",
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("extremes", sa.LargeBinary(), nullable=False),
        sa.Column("marks", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_block_attempt_id_attempt", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("attempt_id", "number", name="pk_block"),
    )
    _create_system_load()
    chunk: list[dict[str, Any]] = []
    attempts = connection.execute(sa.text("SELECT id FROM attempt ORDER BY id")).scalars().all()
    for attempt_id in attempts:
        for row in _blocks(connection, attempt_id):
            chunk.append(row)
            if len(chunk) == CHUNK:
                connection.execute(sa.insert(block), chunk)
                chunk.clear()
    if chunk:
        connection.execute(sa.insert(block), chunk)


def _create_system_load() -> None:
    op.create_table(
        "system_load",
        sa.Column("attempt_id", ROW_ID, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cpu_percent", sa.Double(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("node_cpu_percent", sa.Double(), nullable=True),
        sa.Column("node_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("node_memory_total_bytes", sa.BigInteger(), nullable=True),
        sa.Column("gpu_percent", sa.Double(), nullable=True),
        sa.Column("gpu_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("gpu_memory_total_bytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempt.id"], name="fk_system_load_attempt_id_attempt", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank", "at", name="pk_system_load"),
    )


def _blocks(connection: sa.Connection, attempt_id: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one attempt's blocks, its steps read a chunk at a time."""
    for number, rows in groupby(_steps(connection, attempt_id), key=lambda row: row[0] // BLOCK_STEPS):
        yield _block(attempt_id, number, list(rows))


def _steps(connection: sa.Connection, attempt_id: int) -> Iterator[Any]:
    query = sa.text(
        f"SELECT step, overflow, discarded, nonfinite_mask, {', '.join(SERIES)} FROM step "
        "WHERE attempt_id = :attempt AND rank = 0 AND step >= :start ORDER BY step LIMIT :limit"
    )
    start = 0
    while True:
        rows = connection.execute(query, {"attempt": attempt_id, "start": start, "limit": 48_000}).all()
        yield from rows
        if len(rows) < 48_000:
            return
        start = rows[-1][0] + 1


def _block(attempt_id: int, number: int, rows: Sequence[Any]) -> dict[str, Any]:
    places = np.array([row[0] % BLOCK_STEPS for row in rows])
    marks = np.zeros(BLOCK_STEPS, np.uint32)
    marks[places] = [1 | bool(row[1]) << 1 | bool(row[2]) << 2 | row[3] << 3 for row in rows]
    # Not measured and not finite are both NULL: neither has an extreme.
    values = np.full((len(SERIES), BLOCK_STEPS), np.nan)
    values[:, places] = np.array([list(row[4:]) for row in rows], np.float64).T
    first, last = int(places[0]), int(places[-1])
    is_plain = bool((marks[first : last + 1] == 1).all())
    return {
        "attempt_id": attempt_id,
        "number": number,
        "first_step": number * BLOCK_STEPS + first,
        "last_step": number * BLOCK_STEPS + last,
        "extremes": _extremes(values).astype("<f8").tobytes(),
        "marks": None if is_plain else zlib.compress(marks.astype("<u4").tobytes(), 1),
    }


def _extremes(values: Any) -> Any:
    """Return (series, buckets, 2): each bucket's smallest and largest value in the order they occur, NaN for none."""
    buckets = values.reshape(len(SERIES), -1, BUCKET_STEPS)
    missing = np.isnan(buckets)
    low, high = np.where(missing, np.inf, buckets), np.where(missing, -np.inf, buckets)
    smallest, largest = low.min(axis=2), high.max(axis=2)
    falls = high.argmax(axis=2) < low.argmin(axis=2)
    pairs = np.stack((np.where(falls, largest, smallest), np.where(falls, smallest, largest)), axis=2)
    pairs[missing.all(axis=2)] = np.nan
    return pairs
