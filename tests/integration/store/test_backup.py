"""A copy of a database is whole, whatever is written meanwhile, and never takes another file's place."""

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from muonscope.contract.run_spec import RunSpec
from service.errors import InvalidInput, Unavailable
from service.store.backup import back_up
from service.store.runs import RunRepository
from service.store.session import Database
from tests.postgres import binaries


def _with_a_run(database: Database) -> str:
    with database.write() as session:
        return RunRepository(session).create(RunSpec(name="kept"))[0].uid


def test_a_copy_holds_what_was_committed_while_a_transaction_goes_on(sqlite_database: Database, tmp_path: Path) -> None:
    uid = _with_a_run(sqlite_database)
    target = tmp_path / "copies" / "copy.db"
    with sqlite_database.write() as session:
        under_way = RunRepository(session).create(RunSpec(name="under way"))[0].uid
        size = back_up(f"sqlite:///{sqlite_database.path}", target)

    copy = Database(f"sqlite:///{target}")
    try:
        with copy.read() as session:
            assert RunRepository(session).get(uid).name == "kept"
            assert RunRepository(session).find(under_way) is None
    finally:
        copy.dispose()
    assert size == target.stat().st_size
    assert [path.name for path in target.parent.iterdir() if not path.name.startswith("copy.db")] == []


def test_a_copy_of_a_large_database_is_made_while_a_service_commits_without_a_pause(tmp_path: Path) -> None:
    source, target = tmp_path / "live.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(source, isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode = WAL")
        store.execute("CREATE TABLE row (content BLOB)")
        store.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40) "
                      "INSERT INTO row SELECT zeroblob(1000000) FROM n")  # fmt: skip
    made, paused = threading.Event(), threading.Event()

    def commit() -> None:
        # A copy in pieces would begin anew for ever; one in a piece is a matter of the disk.
        deadline = time.monotonic() + 30
        with closing(sqlite3.connect(source, isolation_level=None)) as service:
            service.execute("PRAGMA synchronous = OFF")
            while not made.is_set():
                service.execute("INSERT INTO row VALUES ('live')")
                if time.monotonic() > deadline:
                    paused.set()
                    return

    service = threading.Thread(target=commit)
    service.start()
    try:
        back_up(f"sqlite:///{source}", target)
    finally:
        made.set()
        service.join()

    assert not paused.is_set()
    with closing(sqlite3.connect(target)) as copy:
        assert copy.execute("SELECT count(*) FROM row WHERE content != 'live'").fetchone() == (40,)


def test_a_file_that_is_there_is_left_as_it_is(sqlite_database: Database, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")

    with pytest.raises(InvalidInput, match="is there already"):
        back_up(f"sqlite:///{sqlite_database.path}", target)

    assert target.read_text() == "mine"


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no database"):
        back_up(f"sqlite:///{tmp_path}/none.db", tmp_path / "copy.db")

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_and_no_traceback(sqlite_database: Database, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(Unavailable, match="cannot be written"):
        back_up(f"sqlite:///{sqlite_database.path}", tmp_path / "file" / "copy.db")


def test_postgres_is_dumped(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(binaries()), prepend=":")

    back_up(postgres_url, tmp_path / "copy.dump")

    assert (tmp_path / "copy.dump").read_bytes().startswith(b"PGDMP")
