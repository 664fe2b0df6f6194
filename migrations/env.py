"""How Alembic reaches the database: on the connection the service hands it, or on a URL given with `-x url=…`.

The whole upgrade is one transaction on both databases: it holds entirely or not at all.
"""

from alembic import context
from sqlalchemy import Connection

from service.store.models import Base
from service.store.session import Database


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        # SQLite cannot alter a column: Alembic rebuilds the table instead.
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def _migrate() -> None:
    given: Connection | None = context.config.attributes.get("connection")
    if given is not None:
        _run(given)
        return
    url = context.get_x_argument(as_dictionary=True).get("url")
    if url is None:
        raise SystemExit("give the database: alembic -x url=sqlite:///path …")
    database = Database(url)
    with database.write() as session:
        _run(session.connection())
    database.dispose()


_migrate()
