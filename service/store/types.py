"""Column types that behave the same on SQLite and PostgreSQL."""

import math
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TypeVar

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Enum, Integer, Text, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from muonscope.contract.telemetry import encode_number

E = TypeVar("E", bound=StrEnum)

# SQLite numbers rows by itself only for a column of the exact type INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC: timestamptz on PostgreSQL, ISO text with six decimals on SQLite."""

    impl = DateTime(timezone=True)
    cache_ok = True

    @property
    def python_type(self) -> type[datetime]:
        return datetime

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; give an aware datetime")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class database_now(FunctionElement[datetime]):
    """The database's clock, to the millisecond or better."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: SQLCompiler, **_: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


@compiles(database_now, "postgresql")
def _postgresql_now(element: database_now, compiler: SQLCompiler, **_: Any) -> str:
    return "clock_timestamp()"


class lowered(FunctionElement[str]):
    """Text in lower case, letters beyond ASCII too, which SQLite's own `lower` leaves as they are."""

    type = Text()
    inherit_cache = True


LOWER_OF_SQLITE: Final = "muonscope_lower"
"""The function that each SQLite connection is given for it."""


@compiles(lowered, "sqlite")
def _sqlite_lower(element: lowered, compiler: SQLCompiler, **options: Any) -> str:
    return f"{LOWER_OF_SQLITE}({compiler.process(element.clauses, **options)})"


@compiles(lowered, "postgresql")
def _postgresql_lower(element: lowered, compiler: SQLCompiler, **options: Any) -> str:
    return f"lower({compiler.process(element.clauses, **options)})"


class utf8_bytes(FunctionElement[int]):
    """How many bytes a text takes in UTF-8."""

    type = Integer()
    inherit_cache = True


@compiles(utf8_bytes, "sqlite")
def _sqlite_bytes(element: utf8_bytes, compiler: SQLCompiler, **options: Any) -> str:
    return f"length(CAST({compiler.process(element.clauses, **options)} AS BLOB))"


@compiles(utf8_bytes, "postgresql")
def _postgresql_bytes(element: utf8_bytes, compiler: SQLCompiler, **options: Any) -> str:
    return f"octet_length({compiler.process(element.clauses, **options)})"


# Built once: building a statement costs more than running it.
_READ_CLOCK: Final = select(database_now())


def read_clock(session: Session) -> datetime:
    """Read the database's clock: the one that leases and heartbeats are measured on."""
    return session.scalars(_READ_CLOCK).one()


def storable_text(text: str) -> str:
    """Replace what PostgreSQL cannot hold as text (NUL, lone surrogates) by the replacement character."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def storable(value: Any) -> Any:
    """Make a JSON value that both databases take: plain text, and non-finite numbers as their strings."""
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return encode_number(value)
    if isinstance(value, dict):
        return {storable_text(str(key)): storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


class StoredJson(TypeDecorator[Any]):
    """A JSON document. Assign a new value to change it; mutation is not seen.

    PostgreSQL's json and not its jsonb, which forgets the order of keys: a matrix's order is its table's.
    """

    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return storable(value)


class StoredText(TypeDecorator[str]):
    """Text from anywhere: what no database can hold is replaced, in values and in comparisons."""

    impl = Text()
    cache_ok = True

    @property
    def python_type(self) -> type[str]:
        return str

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable_text(value)


def words(enum: type[E], name: str) -> Enum:
    """A text column that a CHECK constraint limits to the enum's values."""
    return Enum(
        enum,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )
