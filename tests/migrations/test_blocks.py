"""The upgrade that brings blocks fills them for the steps that are stored already."""

import math
from typing import Any

from sqlalchemy import delete, select, text

from muonscope.contract.telemetry import StepBatch, StepRecord
from service.store.blocks import BlockRepository
from service.store.migrate import upgrade
from service.store.models import Block
from service.store.session import Database, Session
from service.store.step_rows import COLUMNS, batch_columns, to_rows
from tests.databases import opened
from tests.records import discarded_record, step_record

_RUN = """
INSERT INTO run (id, uid, spec, fingerprint, name, task, step_ordering, implementation, zero_stage, world_size, steps,
    priority, status, stop_requested, epoch, findings, revision, created_at)
VALUES (1, 'aaaaaaaaaaaa', '{}', 'f', 'a run', 'simple_model', 'ordered', 'muon_core', 1, 2, 5000,
    0, 'succeeded', FALSE, 2, '[]', 1, '2026-11-29 00:00:00+00:00')
"""
_ATTEMPT = """
INSERT INTO attempt (id, run_id, number, submission_id, status, epoch, enrolment_token_hash, lease_expires_at,
    steps_recorded, silent_ranks, phases, environment, ranks, first_step, stored_steps, next_step, created_at)
VALUES (:id, 1, :id, 'run-aaaaaaaaaaaa-a' || :text, 'succeeded', :id, '', '2026-11-29 00:00:00+00:00', 0, '[]', '{}',
    '{}', '[]', 0, 1, 5000, '2026-11-29 00:00:00+00:00')
"""


def _fill_first_schema(session: Session, records: dict[tuple[int, int], list[StepRecord]]) -> None:
    session.execute(text(_RUN))
    for attempt_id in sorted({attempt for attempt, _ in records}):
        session.execute(text(_ATTEMPT), {"id": attempt_id, "text": str(attempt_id)})
    places = ", ".join(f":{name}" for name in COLUMNS)
    for (attempt_id, rank), listed in records.items():
        batch = StepBatch.of(listed, epoch=1, rank=rank)
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in to_rows(attempt_id, batch, batch_columns(batch))]
        session.execute(text(f"INSERT INTO step ({', '.join(COLUMNS)}) VALUES ({places})"), rows)


def _stored(session: Session) -> list[Any]:
    return list(session.execute(select(Block.__table__).order_by(Block.attempt_id, Block.number)).all())


def test_an_upgrade_fills_the_blocks_as_the_store_itself_would(empty_url: str) -> None:
    odd = {3: math.nan, 5: math.inf, 7: -math.inf, 9: None}
    first = [
        discarded_record(step) if step % 97 == 0 else step_record(step, loss=odd.get(step % 50, math.sin(step)))
        for step in range(1500)
        if not 700 <= step < 730
    ]
    second = [step_record(step, grad_norm=step / 7) for step in range(1000, 1100)]
    records = {(1, 0): first, (1, 1): first[:10], (2, 0): second}
    with opened(empty_url) as store:
        upgrade(store, "0001")
        with store.write() as session:
            _fill_first_schema(session, records)

        upgrade(store)

        with store.write() as session:
            migrated = _stored(session)
            session.execute(delete(Block))
            for (attempt_id, rank), listed in records.items():
                if rank == 0:
                    BlockRepository(session).replace(attempt_id, batch_columns(StepBatch.of(listed, epoch=1)))
            assert migrated == _stored(session)
        assert [row[:2] for row in migrated] == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 2)]


def test_an_upgrade_of_a_store_without_steps_leaves_no_blocks(empty_url: str) -> None:
    with opened(empty_url) as store:
        upgrade(store, "0001")
        upgrade(store)
        with store.read() as session:
            assert _stored(session) == []


def test_a_block_that_says_otherwise_than_its_steps_would_be_noticed(sqlite_database: Database) -> None:
    """The comparison above has teeth: another loss makes another block."""
    one, other = (batch_columns(StepBatch.of([step_record(0, loss=loss)], epoch=1)) for loss in (1.0, 2.0))
    with sqlite_database.write() as session:
        _fill_first_schema_on_head(session)
        BlockRepository(session).replace(1, one)
        before = _stored(session)
        BlockRepository(session).replace(1, other)
        assert _stored(session) != before


def _fill_first_schema_on_head(session: Session) -> None:
    session.execute(text(_RUN))
    session.execute(text(_ATTEMPT), {"id": 1, "text": "1"})
