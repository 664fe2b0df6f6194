"""The tables of alerts: rules, and the messages made of them."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from muonscope.contract.status import AlertKind, DeliveryStatus
from service.store.base import Base
from service.store.types import RowId, words


class Alert(Base):
    """A rule: which runs somebody wants to hear of. Its secret is derived from a key that no database holds."""

    __tablename__ = "alert"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str]
    url: Mapped[str]
    kind: Mapped[AlertKind] = mapped_column(words(AlertKind, "kind"))
    condition: Mapped[dict[str, Any]]
    """What to watch for, as AlertRule's `when`."""
    tag: Mapped[str | None]
    key_id: Mapped[str] = mapped_column(String(16))
    """Which signing key its secret was derived from."""
    seen_event: Mapped[int]
    """Events up to this id were looked at."""
    seen_revision: Mapped[int]
    """Runs up to this revision were looked at."""
    who: Mapped[str]
    created_at: Mapped[datetime]


class AlertDelivery(Base):
    """One message, made once for what happened, and sent until its receiver has taken it."""

    __tablename__ = "alert_delivery"
    __table_args__ = (
        UniqueConstraint("alert_id", "run_uid", "occurrence"),
        CheckConstraint("(status = 'pending') = (next_try_at IS NOT NULL)", name="next_try"),
        Index("ix_alert_delivery_alert_id_id", "alert_id", "id"),
        Index(
            "ix_alert_delivery_next_try_at",
            "next_try_at",
            postgresql_where=text("status = 'pending'"),
            sqlite_where=text("status = 'pending'"),
        ),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    """Sent with every attempt: by it a receiver knows a message that came twice."""
    alert_id: Mapped[int] = mapped_column(ForeignKey("alert.id", ondelete="CASCADE"))
    run_uid: Mapped[str] = mapped_column(String(32))
    """Empty where it is about no run. The log outlives the run."""
    occurrence: Mapped[str] = mapped_column(String(64))
    body: Mapped[str]
    """The JSON that is signed and sent, the same with every attempt."""
    status: Mapped[DeliveryStatus] = mapped_column(words(DeliveryStatus, "status"))
    attempts: Mapped[int]
    next_try_at: Mapped[datetime | None]
    response_code: Mapped[int | None]
    response: Mapped[str | None]
    """The beginning of what the receiver answered last."""
    error: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]

    alert: Mapped[Alert] = relationship(lazy="raise")
