"""What is no record file of this version is an error that says what it is."""

from pathlib import Path

from sqlalchemy import text

from muonscope.cli.record_keeper import RecordFile
from muonscope.contract.run_spec import ExternalTask, RunSpec
from service.store.migrate import upgrade
from service.store.session import Database
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import FakeService


def test_a_damaged_record_file_is_an_error_of_one_line(
    command: RunCommand, service: FakeService, tmp_path: Path
) -> None:
    file = tmp_path / "mine.db"
    file.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)

    failed = command("import", str(file))

    assert failed.code == 1
    assert failed.err.startswith(f"muonscope: {file} cannot be read: file is not a database\n  remedy: ")


def test_a_record_file_of_a_later_version_is_an_error_of_one_line(
    command: RunCommand, service: FakeService, tmp_path: Path
) -> None:
    file = tmp_path / "mine.db"
    database = Database(f"sqlite:///{file}")
    upgrade(database)
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'of_tomorrow'"))
    database.dispose()

    failed = command("import", str(file))

    assert failed.code == 1
    assert failed.err.startswith("muonscope: the database's schema is of_tomorrow, which this version does not know")


def test_a_record_file_without_a_run_that_has_ended_is_said_to_hold_none(
    command: RunCommand, service: FakeService, tmp_path: Path
) -> None:
    empty, unended = RecordFile(tmp_path / "empty.db"), RecordFile(tmp_path / "unended.db")
    unended.begin(RunSpec(name="mine", task=ExternalTask()))
    empty.close()
    unended.close()

    none, going = command("import", str(tmp_path / "empty.db")), command("import", str(tmp_path / "unended.db"))

    assert (none.code, going.code, none.out, going.out) == (1, 1, "", "")
    assert none.err.startswith(f"muonscope: {tmp_path}/empty.db: holds no run\n  remedy: give the file that ")
    assert "(mine) is running: not imported" in going.err
    assert "has no run that has ended\n  remedy: let its run end" in going.err


def test_a_record_files_name_may_hold_any_character(command: RunCommand, service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "lr=0.02?, 50 %41 #1.db"
    record = RecordFile(file)
    record.begin(RunSpec(name="mine", task=ExternalTask()))
    record.close()

    going = command("import", str(file))

    assert list(tmp_path.iterdir()) == [file]
    assert "(mine) is running: not imported" in going.err
