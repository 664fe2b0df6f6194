"""Models and migrations say the same, an upgrade holds entirely or not at all, and never goes down."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from service.store import migrate
from service.store.migrate import SchemaTooNew, upgrade
from service.store.models import Base
from service.store.session import Database
from tests.databases import opened
from tests.postgres import fresh_database

_POSTGRES_FACTS = {
    "constraints": "SELECT conrelid::regclass || ' ' || conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = 'public'::regnamespace",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "columns": "SELECT table_name || '.' || column_name, concat_ws(' ', data_type, character_maximum_length, "
    "is_nullable, column_default) FROM information_schema.columns WHERE table_schema = 'public'",
    "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = 'public'",
}


def _facts(database: Database) -> dict[str, str]:
    """Describe the schema by what the database itself says of it, Alembic's own table aside."""
    with database.read() as session:
        if database.is_sqlite:
            rows = session.execute(text("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
            facts = {name: _normal(sql) for name, sql in rows}
        else:
            facts = {
                f"{kind} {name}": definition
                for kind, query in _POSTGRES_FACTS.items()
                for name, definition in session.execute(text(query))
            }
    return {name: fact for name, fact in facts.items() if "alembic_version" not in name}


def _normal(sql: str) -> str:
    """Forget white space and the order in which a table's parts are written."""
    head, _, rest = " ".join(sql.split()).partition("(")
    parts, _, tail = rest.rpartition(")")
    return " ".join([head, *sorted(part.strip() for part in re.split(r",\s(?=CONSTRAINT )", parts)), tail])


@pytest.fixture
def twin_url(request: pytest.FixtureRequest, empty_url: str, tmp_path: Path) -> Iterator[str]:
    """A second empty database on the same backend."""
    if empty_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path / 'twin.db'}"
        return
    with fresh_database(request.getfixturevalue("postgres_url")) as url:
        yield url


def test_the_migrations_make_exactly_the_schema_of_the_models(empty_url: str, twin_url: str) -> None:
    with opened(empty_url) as migrated, opened(twin_url) as modelled:
        upgrade(migrated)
        Base.metadata.create_all(modelled.engine)

        assert _facts(migrated) == _facts(modelled)


def test_alembic_itself_sees_nothing_to_migrate(database: Database) -> None:
    with database.read() as session:
        context = MigrationContext.configure(
            session.connection(), opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_a_model_that_has_moved_on_is_noticed(database: Database) -> None:
    with database.write() as session:
        session.execute(text("DROP INDEX ix_run_queue"))
    with database.read() as session:
        differences = compare_metadata(MigrationContext.configure(session.connection()), Base.metadata)

    assert [difference[0] for difference in differences] == ["add_index"]


def test_a_second_upgrade_changes_nothing(empty_url: str) -> None:
    with opened(empty_url) as store:
        first = upgrade(store)
        before = _facts(store)

        assert upgrade(store) == first
        assert _facts(store) == before


def test_an_upgrade_that_fails_leaves_nothing_behind(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after_the_work(*arguments: object, **options: object) -> None:
        real_upgrade(*arguments, **options)
        raise OSError("the power went")

    real_upgrade = migrate.command.upgrade
    monkeypatch.setattr(migrate.command, "upgrade", fail_after_the_work)
    with opened(empty_url) as store:
        with pytest.raises(OSError, match="the power went"):
            upgrade(store)

        assert inspect(store.engine).get_table_names() == []
        monkeypatch.undo()
        upgrade(store)
        assert "run" in inspect(store.engine).get_table_names()


def test_a_schema_from_the_future_is_refused_and_left_as_it_is(database: Database) -> None:
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(SchemaTooNew, match=r"9999.*start the newer Muonscope"):
        upgrade(database)

    with database.read() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"


def test_a_new_sqlite_store_gives_disk_back_piecemeal_and_logs_ahead(sqlite_database: Database) -> None:
    with sqlite_database.read() as session:
        pragmas = {
            name: session.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "auto_vacuum", "foreign_keys")
        }
    incremental = 2
    assert pragmas == {"journal_mode": "wal", "auto_vacuum": incremental, "foreign_keys": 1}
