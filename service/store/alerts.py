"""Alerts: rules, what each has looked at already, and the messages made of them: once each, kept until taken."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, String, cast, delete, func, literal, select
from sqlalchemy.orm import Session, joinedload

from muonscope.contract.alerts import AlertRule
from muonscope.contract.status import AlertKind, AttemptStatus, DeliveryStatus, RunStatus
from service.errors import Conflict, NotFound
from service.store.alert_models import Alert, AlertDelivery
from service.store.events import EventRepository
from service.store.models import Attempt, Event, Run, RunSummary, RunTag
from service.store.runs import RunRepository, new_uid
from service.store.types import read_clock, storable_text

MAX_ALERTS: Final = 100
# A rule keeps so many messages that are settled; those that are not are all kept.
KEPT_DELIVERIES: Final = 1000


class AlertRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    # -- rules ------------------------------------------------------------------------------------------------------

    def create(self, rule: AlertRule, *, key_id: str, who: str) -> Alert:
        """Watch from now on; what has happened before is not told.

        Raises:
            Conflict: there are MAX_ALERTS already.
        """
        if self._session.scalars(select(func.count()).select_from(Alert)).one() >= MAX_ALERTS:
            raise Conflict(f"there are {MAX_ALERTS} alerts already", remedy="delete one with DELETE /alerts/{id}")
        alert = Alert(
            uid=new_uid(),
            name=rule.name,
            url=rule.url,
            kind=AlertKind(rule.when.kind),
            condition=rule.when.model_dump(mode="json"),
            tag=rule.tag,
            key_id=key_id,
            seen_event=EventRepository(self._session).last_id(),
            seen_revision=RunRepository(self._session).last_revision(),
            who=who,
            created_at=read_clock(self._session),
        )
        self._session.add(alert)
        self._tell(alert, "alert made", who)
        self._session.flush()
        return alert

    def list(self) -> Sequence[Alert]:
        """List every rule, oldest first."""
        return self._session.scalars(select(Alert).order_by(Alert.id)).all()

    def get(self, uid: str) -> Alert:
        """Return the rule of this id; raises NotFound."""
        alert = self._session.scalars(select(Alert).where(Alert.uid == storable_text(uid))).one_or_none()
        if alert is None:
            raise NotFound(f"there is no alert {uid[:64]!r}", field="id", value=uid, remedy="list them: GET /alerts")
        return alert

    def delete(self, uid: str, *, who: str) -> None:
        """Forget a rule and its messages; raises NotFound."""
        alert = self.get(uid)
        self._tell(alert, "alert deleted", who)
        self._session.execute(delete(Alert).where(Alert.id == alert.id))

    def _tell(self, alert: Alert, what: str, who: str) -> None:
        detail = {"alert": alert.uid, "name": alert.name, "kind": str(alert.kind)}
        EventRepository(self._session).append("alert_rule", who=who, why=what, detail=detail)

    # -- what happened ----------------------------------------------------------------------------------------------

    def events_after(self, alert: Alert, kind: str, words: Collection[str], limit: int) -> Sequence[Event]:
        """List what happened to runs since the rule last looked, oldest first, of one kind and to these words."""
        query = select(Event).join(Run, Run.id == Event.run_id).options(joinedload(Event.run))
        query = query.where(Event.id > alert.seen_event, Event.kind == kind, Event.to_status.in_(words))
        return self._session.scalars(query.where(*_tagged(alert)).order_by(Event.id).limit(limit)).all()

    def discarding(self, alert: Alert, share: float, after_steps: int, limit: int) -> Sequence[Run]:
        """List runs that changed since the rule last looked and have discarded more than a share of their steps."""
        query = select(Run).join(RunSummary, RunSummary.run_id == Run.id).options(joinedload(Run.summary))
        query = query.where(Run.revision > alert.seen_revision, RunSummary.steps >= after_steps)
        query = query.where(RunSummary.discarded > share * RunSummary.steps, *_tagged(alert))
        query = query.where(Run.uid.not_in(self._told(alert)))
        return self._session.scalars(query.order_by(Run.revision).limit(limit)).all()

    def silent(self, alert: Alert, seconds: float, limit: int) -> Sequence[Attempt]:
        """List running attempts, their runs loaded, whose newest step is older than this, and untold."""
        since = read_clock(self._session) - timedelta(seconds=seconds)
        query = select(Attempt).join(Run, Run.id == Attempt.run_id).options(joinedload(Attempt.run))
        query = query.where(Run.status == RunStatus.RUNNING, Attempt.status == AttemptStatus.RUNNING)
        query = query.where(func.coalesce(Attempt.stepped_at, Attempt.started_at) < since, *_tagged(alert))
        told = select(AlertDelivery.occurrence).where(AlertDelivery.alert_id == alert.id)
        told = told.where(AlertDelivery.run_uid == Run.uid, AlertDelivery.occurrence == silence_of())
        return self._session.scalars(query.where(~told.exists()).order_by(Attempt.id).limit(limit)).all()

    def _told(self, alert: Alert) -> Any:
        return select(AlertDelivery.run_uid).where(AlertDelivery.alert_id == alert.id)

    # -- messages ---------------------------------------------------------------------------------------------------

    def post(self, alert: Alert, *, run_uid: str, occurrence: str, body: str, uid: str) -> AlertDelivery | None:
        """Keep a message to be sent at once; None where one of the same occurrence is there already."""
        same = select(AlertDelivery.id).where(AlertDelivery.alert_id == alert.id, AlertDelivery.run_uid == run_uid)
        if self._session.scalars(same.where(AlertDelivery.occurrence == occurrence)).first() is not None:
            return None
        now = read_clock(self._session)
        row = AlertDelivery(
            uid=uid, alert_id=alert.id, run_uid=run_uid, occurrence=occurrence, body=body,
            status=DeliveryStatus.PENDING, attempts=0, next_try_at=now, created_at=now,
        )  # fmt: skip
        self._session.add(row)
        self._session.flush()
        return row

    def due(self, limit: int) -> Sequence[AlertDelivery]:
        """List messages whose time has come, the longest due first, their rules loaded."""
        query = select(AlertDelivery).where(AlertDelivery.status == DeliveryStatus.PENDING)
        query = query.where(AlertDelivery.next_try_at <= read_clock(self._session)).options(
            joinedload(AlertDelivery.alert)
        )
        return self._session.scalars(query.order_by(AlertDelivery.next_try_at, AlertDelivery.id).limit(limit)).all()

    def record(
        self, uid: str, *, code: int | None, text: str, error: str | None, pause_s: Mapping[int, float]
    ) -> AlertDelivery | None:
        """Keep what became of an attempt to deliver.

        Args:
            uid: the message's.
            code: the HTTP status.
            text: what was answered, bounded.
            error: why it was not taken; None where it was.
            pause_s: the pause after each attempt, by its number from 1; after the last of them it is given up.
        Returns:
            The message; None where its rule was deleted meanwhile.
        """
        row = self._session.scalars(select(AlertDelivery).where(AlertDelivery.uid == uid)).one_or_none()
        if row is None or row.status is not DeliveryStatus.PENDING:
            return row
        now = read_clock(self._session)
        row.attempts += 1
        row.response_code, row.response, row.error = code, text or None, error
        if error is not None and row.attempts in pause_s:
            row.next_try_at = now + timedelta(seconds=pause_s[row.attempts])
            return row
        row.status = DeliveryStatus.GIVEN_UP if error is not None else DeliveryStatus.DELIVERED
        row.next_try_at, row.finished_at = None, now
        self._session.flush()
        self._forget_old(row.alert_id)
        return row

    def _forget_old(self, alert_id: int) -> None:
        settled = select(AlertDelivery.id).where(
            AlertDelivery.alert_id == alert_id, AlertDelivery.status != DeliveryStatus.PENDING
        )
        oldest_kept = settled.order_by(AlertDelivery.id.desc()).offset(KEPT_DELIVERIES).limit(1).scalar_subquery()
        # A silence and a share of discarded steps are told once because the message is there.
        forgettable = AlertDelivery.occurrence.like("event-%") | AlertDelivery.occurrence.like("test-%")
        self._session.execute(
            delete(AlertDelivery).where(
                AlertDelivery.alert_id == alert_id, AlertDelivery.status != DeliveryStatus.PENDING,
                AlertDelivery.id <= oldest_kept, forgettable,
            ),
            execution_options={"synchronize_session": False},
        )  # fmt: skip

    def deliveries(self, alert: Alert, *, before: int | None = None, limit: int = 50) -> Sequence[AlertDelivery]:
        """List a rule's messages, newest first, from before a row's id on."""
        query = select(AlertDelivery).where(AlertDelivery.alert_id == alert.id)
        if before is not None:
            query = query.where(AlertDelivery.id < before)
        return self._session.scalars(query.order_by(AlertDelivery.id.desc()).limit(limit)).all()


def silence_of() -> ColumnElement[str]:
    """Name an attempt's silence, as `occurrence`: a new one begins with each new step."""
    return literal("silence-") + cast(Attempt.number, String) + literal("-") + cast(Attempt.next_step, String)


def _tagged(alert: Alert) -> Sequence[ColumnElement[bool]]:
    if alert.tag is None:
        return ()
    return (select(RunTag.run_id).where(RunTag.run_id == Run.id, RunTag.tag == alert.tag).exists(),)
