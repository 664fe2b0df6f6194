"""The tables of the controllers themselves: whether the queue is open, who may hold how much, and who leads."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from muonscope.contract.status import LimitKind, QueueMode
from service.store.base import Base
from service.store.types import StoredText, words


class QueueState(Base):
    """The one row that says whether queued runs may start."""

    __tablename__ = "queue_state"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    mode: Mapped[QueueMode] = mapped_column(words(QueueMode, "mode"))
    aging_s: Mapped[float]
    """What `rank` was reckoned with."""
    who: Mapped[str]
    why: Mapped[str]
    changed_at: Mapped[datetime]


class QueueLimit(Base):
    """The most GPUs that one user's runs, or one tag's, hold at once."""

    __tablename__ = "queue_limit"

    kind: Mapped[LimitKind] = mapped_column(words(LimitKind, "kind"), primary_key=True)
    name: Mapped[str] = mapped_column(StoredText, primary_key=True)
    """A user or a tag; `*` is each one that has no limit of its own."""
    max_gpus: Mapped[float]
    who: Mapped[str]
    changed_at: Mapped[datetime]


class Leadership(Base):
    """The one row that says which controller leads, until when on the database's clock."""

    __tablename__ = "leadership"
    __table_args__ = (CheckConstraint("id = 1", name="single"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str | None] = mapped_column(ForeignKey("controller.id", ondelete="SET NULL"))
    term: Mapped[int]
    """Grows with each change of leader."""
    expires_at: Mapped[datetime]


class Controller(Base):
    """A controller process that shares this store."""

    __tablename__ = "controller"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    url: Mapped[str]
    """Where workers reach it."""
    place: Mapped[str]
    """Host, boot, process id and its start: proof, on that host, that it is gone."""
    seen_at: Mapped[datetime]
