"""What all models share: how constraints are named, and which column type each Python type becomes."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Double, LargeBinary, MetaData
from sqlalchemy.orm import DeclarativeBase

from service.store.types import StoredJson, StoredText, UtcDateTime


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own declaration)
        int: BigInteger(),
        float: Double(),
        str: StoredText(),
        bytes: LargeBinary(),
        datetime: UtcDateTime(),
        dict[str, Any]: StoredJson(),
        list[Any]: StoredJson(),
    }
