import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from service.errors import Unavailable
from service.store.models import Event, Run
from service.store.session import Database
from tests.databases import opened
from tests.records import end_attempt, queue_run, start_attempt, started


def test_a_block_that_ends_is_committed_and_one_that_raises_is_rolled_back(database: Database) -> None:
    kept = queue_run(database)
    both = text("UPDATE run SET name = 'changed'"), text("UPDATE run SET status = 'done'")
    with pytest.raises(IntegrityError), database.write() as session:
        [session.execute(statement) for statement in both]

    with database.read() as session:
        assert session.execute(select(Run.uid, Run.name)).all() == [(kept, "a run")]


def test_what_a_reader_changes_is_thrown_away(database: Database) -> None:
    uid = queue_run(database)
    with database.read() as session:
        session.scalars(select(Run).where(Run.uid == uid)).one().name = "changed"
        session.flush()

    with database.read() as session:
        assert session.scalars(select(Run.name)).one() == "a run"


def test_a_reader_sees_one_snapshot_while_others_write(database: Database) -> None:
    queue_run(database)
    with database.read() as session:
        before = session.scalars(select(Run.uid)).all()
        queue_run(database)

        assert session.scalars(select(Run.uid)).all() == before


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
def test_sqlite_syncs_fully_only_where_a_reply_depends_on_it(
    sqlite_database: Database, durable: bool, level: int
) -> None:
    for _ in range(2):
        with sqlite_database.write(durable=not durable) as session:
            session.execute(text("SELECT 1"))
        with sqlite_database.write(durable=durable) as session:
            assert session.execute(text("PRAGMA synchronous")).scalar_one() == level


def test_a_new_connection_reads_while_another_process_writes(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = queue_run(sqlite_database)
    # Whoever waited for the writer would wait for so long.
    monkeypatch.setattr("service.store.session._BUSY_TIMEOUT_S", 60.0)
    with opened(f"sqlite:///{sqlite_database.path}") as other, sqlite_database.write():
        began = time.monotonic()
        with other.read() as session:
            assert session.scalars(select(Run.uid)).all() == [uid]
        assert time.monotonic() - began < 30


def test_a_locked_database_is_unavailable_and_not_an_error_of_ours(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.store.session._BUSY_TIMEOUT_S", 0.05)
    with opened(f"sqlite:///{sqlite_database.path}") as impatient, sqlite_database.write() as session:
        session.execute(text("UPDATE run SET name = 'x'"))
        with pytest.raises(Unavailable, match="locked"), impatient.write():
            pass


def _write_both(database: Database, began: threading.Barrier) -> list[float | None]:
    """Write from two threads at once; return how long each took to be refused, None where it was not."""
    refused_after: list[float | None] = []

    def write() -> None:
        began.wait()
        start = time.monotonic()
        try:
            with database.write() as session:
                session.execute(text("UPDATE run SET name = 'y'"))
        except Unavailable:
            refused_after.append(time.monotonic() - start)
        else:
            refused_after.append(None)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return refused_after


def test_all_that_wait_behind_a_locked_database_are_refused_within_one_limit(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 5.0
    monkeypatch.setattr("service.store.session._BUSY_TIMEOUT_S", limit_s)
    with opened(f"sqlite:///{sqlite_database.path}") as impatient, sqlite_database.write() as session:
        session.execute(text("UPDATE run SET name = 'x'"))
        refused_after = _write_both(impatient, threading.Barrier(2))

    # One after another, the second would have waited two limits; a busy machine has most of one for the rest.
    assert len(refused_after) == 2
    assert all(taken is not None and 0.9 * limit_s < taken < 1.9 * limit_s for taken in refused_after)


def test_all_that_wait_get_their_turn_once_the_lock_is_let_go(sqlite_database: Database) -> None:
    uid = queue_run(sqlite_database)
    began = threading.Barrier(3)
    with opened(f"sqlite:///{sqlite_database.path}") as patient:
        refused_after: list[float | None] = []
        writers = threading.Thread(target=lambda: refused_after.extend(_write_both(patient, began)))
        with sqlite_database.write() as session:
            session.execute(text("UPDATE run SET name = 'x'"))
            writers.start()
            began.wait()
        writers.join()

    assert refused_after == [None, None]
    with sqlite_database.read() as session:
        assert session.execute(select(Run.uid, Run.name)).all() == [(uid, "y")]


def _log_bytes(database: Database) -> int:
    assert database.path is not None
    return database.path.with_name(f"{database.path.name}-wal").stat().st_size


def test_folds_wait_for_readers_and_for_each_other_and_keep_no_writer_waiting(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = queue_run(sqlite_database)
    # What a fold would keep writers out for, did it wait for the reader with their lock.
    monkeypatch.setattr("service.store.session._BUSY_TIMEOUT_S", 60.0)
    took = 0.0
    with ThreadPoolExecutor(2) as threads, opened(f"sqlite:///{sqlite_database.path}") as other:
        with sqlite_database.read() as session:
            session.scalars(select(Run.uid)).all()
            folds = [threads.submit(sqlite_database.fold_log, wait_s=120.0) for _ in range(2)]
            for _ in range(5):
                time.sleep(0.1)
                began = time.monotonic()
                with other.write() as writing:
                    writing.execute(text("UPDATE run SET name = 'meanwhile'"))
                took = max(took, time.monotonic() - began)
            left = _log_bytes(sqlite_database)

        assert [fold.result(timeout=120) for fold in folds] == [True, True]
    assert left > 0
    assert _log_bytes(sqlite_database) == 0
    assert took < 30, "SQLite keeps writers out for as long as a fold waits for a reader at a time"
    with sqlite_database.read() as session:
        assert session.execute(select(Run.uid, Run.name)).all() == [(uid, "meanwhile")]


def test_a_fold_leaves_the_rest_to_a_later_one_once_it_waited_long_enough(sqlite_database: Database) -> None:
    queue_run(sqlite_database)
    with sqlite_database.read() as session:
        session.scalars(select(Run.uid)).all()
        assert not sqlite_database.fold_log(wait_s=0.2)

    assert sqlite_database.fold_log(wait_s=0.0)
    assert _log_bytes(sqlite_database) == 0


def test_an_unreachable_database_is_unavailable() -> None:
    absent = Database("postgresql://nobody@/none?host=/nonexistent")
    with pytest.raises(Unavailable, match="cannot answer now"):
        absent.ping()
    absent.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_server_that_takes_no_writes_now_is_unavailable_and_not_an_error_of_ours(database: Database) -> None:
    # As one is that was a standby a moment ago.
    both = text("SET TRANSACTION READ ONLY"), text("UPDATE run SET name = 'x'")
    with pytest.raises(Unavailable, match="read-only"), database.write() as session:
        [session.execute(statement) for statement in both]


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_a_store_that_could_not_keep_a_record_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///"):
        Database(url)


def test_event_ids_become_visible_in_their_order(database: Database) -> None:
    threads = [threading.Thread(target=queue_run, args=(database,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while len(seen) < 8:
        with database.read() as session:
            now = session.scalars(select(Event.id).order_by(Event.id)).all()
        assert list(now[: len(seen)]) == seen
        seen = list(now)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run SET status = 'done'",
        "UPDATE run SET verdict = 'fine', verdict_evidence = 'none'",
        "UPDATE run SET verdict = 'trains'",
        "UPDATE run SET idempotency_key = 'k'",
        "UPDATE attempt SET status = 'queued'",
        "UPDATE attempt SET stored_steps = -1",
        "UPDATE attempt SET run_id = 77",
    ],
)
def test_the_database_refuses_impossible_states(database: Database, statement: str) -> None:
    started(database)
    with pytest.raises(IntegrityError), database.write() as session:
        session.execute(text(statement))


def test_the_database_refuses_a_second_live_attempt_but_takes_one_after_the_first_ended(database: Database) -> None:
    uid, first = started(database)
    copy = text(
        "INSERT INTO attempt (run_id, number, submission_id, status, epoch, enrolment_token_hash, lease_expires_at, "
        "steps_recorded, silent_ranks, phases, environment, ranks, first_step, stored_steps, next_step, created_at) "
        "SELECT run_id, 2, 'x', status, 2, '', lease_expires_at, 0, '[]', '{}', '{}', '[]', 0, 0, 0, created_at "
        "FROM attempt"
    )
    with pytest.raises(IntegrityError), database.write() as session:
        session.execute(copy)

    end_attempt(database, first)
    assert start_attempt(database, uid).endswith("-a2")


def test_deleting_a_run_takes_everything_of_it_along(database: Database) -> None:
    uid, _ = started(database)
    with database.write() as session:
        session.execute(text("DELETE FROM run WHERE uid = :uid"), {"uid": uid})

    with database.read() as session:
        for table in ("attempt", "event", "run_summary", "step", "nonfinite_event", "parameter", "run_tag"):
            assert session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() == 0
