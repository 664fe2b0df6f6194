"""A copy of a database is whole, whatever is written meanwhile, and never takes another file's place."""

from pathlib import Path

import pytest

from muonscope.contract.run_spec import RunSpec
from service.errors import InvalidInput
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


def test_postgres_is_dumped(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(binaries()), prepend=":")

    back_up(postgres_url, tmp_path / "copy.dump")

    assert (tmp_path / "copy.dump").read_bytes().startswith(b"PGDMP")
