"""Bring the database to the schema this version knows: all or nothing, and never downwards."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

import migrations
from service.errors import Unavailable
from service.store.session import Database

# Any constant: it keeps two services that start at once from migrating one PostgreSQL together.
_ADVISORY_LOCK = 0x6D756F6E


class SchemaTooNew(RuntimeError):
    """The database was written by a later version of Muonscope than this one."""

    def __init__(self, revision: str, head: str) -> None:
        super().__init__(
            f"the database's schema is {revision}, which this version does not know (its newest is {head}); "
            "start the newer Muonscope, or give another database"
        )
        self.revision = revision
        self.head = head


def configuration() -> Config:
    """Return Alembic's configuration, wherever the package is installed."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__path__[0])).replace("%", "%%"))
    return config


def upgrade(database: Database, revision: str = "head") -> str:
    """Upgrade the schema in one transaction and return the revision it is at.

    Raises:
        SchemaTooNew: the database is at a revision this version does not have; nothing was changed.
        Unavailable: the database cannot be reached, read or made.
    """
    config = configuration()
    script = ScriptDirectory.from_config(config)
    head = script.get_current_head() or ""
    if database.path is not None:
        try:
            database.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                f"the folder of {database.path} cannot be made: {error.strerror}",
                remedy="name another folder by MUONSCOPE_HOME, or another database by MUONSCOPE_DATABASE_URL",
            ) from error
    with database.write() as session:
        connection = session.connection()
        if not database.is_sqlite:
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        current = MigrationContext.configure(connection).get_current_revision()
        if current is not None and not _is_known(script, current):
            raise SchemaTooNew(current, head)
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return head if revision == "head" else revision


def read_revisions(database: Database) -> tuple[str | None, str]:
    """Return the revision the database is at, None where it has no schema yet, and the newest this version knows.

    Raises:
        SchemaTooNew: the database is at a revision this version does not have.
        Unavailable: the database cannot be reached or read.
    """
    script = ScriptDirectory.from_config(configuration())
    head = script.get_current_head() or ""
    with database.read() as session:
        current = MigrationContext.configure(session.connection()).get_current_revision()
    if current is not None and not _is_known(script, current):
        raise SchemaTooNew(current, head)
    return current, head


def _is_known(script: ScriptDirectory, revision: str) -> bool:
    return revision in {step.revision for step in script.walk_revisions()}
