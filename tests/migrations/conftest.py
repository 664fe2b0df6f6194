from tests.databases import (
    database,
    empty_url,
    postgres_template,
    postgres_url,
    sqlite_database,
    sqlite_template,
)

__all__ = ["database", "empty_url", "postgres_template", "postgres_url", "sqlite_database", "sqlite_template"]
