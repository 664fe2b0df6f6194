"""Alerts: rules whose matches are posted to a webhook, and the log of what was sent."""

from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import Body, Path, Query, Response

from muonscope.contract.alerts import AlertRule, Condition
from muonscope.contract.status import DeliveryStatus
from service.alert_messages import message
from service.api.dependencies import CallerDependency, ControllerDependency, DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, Out
from service.errors import Unavailable
from service.settings import Settings
from service.store.alerts import AlertRepository
from service.store.models import Alert, AlertDelivery
from service.store.runs import new_uid
from service.store.types import read_clock
from service.webhooks import SigningKey, check_url, shown_url

router = Router(prefix="/alerts", tags=["alerts"], responses=PROBLEMS)

AlertId = Annotated[str, Path(max_length=64, description="The alert's id.")]
_EXAMPLE: Final[dict[str, Any]] = {
    "name": "a run died",
    "url": "https://hooks.example.org/muonscope",
    "when": {"kind": "verdict", "verdicts": ["dies", "poisoned"]},
}


class AlertOut(Out):
    id: str
    name: str
    url: str
    """Without its path, which may hold a key."""
    when: Condition
    tag: str | None
    who: str
    created_at: datetime


class AlertMade(AlertOut):
    secret: str
    """Verifies the messages' signatures. It is shown here and never again."""


class AlertsOut(Out):
    alerts: list[AlertOut]


class DeliveryOut(Out):
    id: str
    """Sent as `webhook-id`, the same with every attempt."""
    run_id: str | None
    status: DeliveryStatus
    attempts: int
    next_try_at: datetime | None
    """When it is sent next; null once it is delivered or given up."""
    response_code: int | None
    """The HTTP status of the last answer; null where there was none."""
    response: str | None
    """The beginning of the last answer."""
    error: str | None
    """Why the last attempt was not taken."""
    body: str
    """What is sent."""
    created_at: datetime
    finished_at: datetime | None


class DeliveriesOut(Out):
    deliveries: list[DeliveryOut]
    next_before: int | None
    """Give it as `before` to read on; null at the end."""


@router.post("", status_code=201, summary="Watch runs, and post a signed message when one matches")
def create_alert(
    rule: Annotated[AlertRule, Body(examples=[_EXAMPLE])],
    response: Response,
    caller: CallerDependency,
    database: DatabaseDependency,
    settings: SettingsDependency,
) -> AlertMade:
    check_url(rule.url, settings)
    key = _signing_key(settings)
    with database.write() as session:
        alert = AlertRepository(session).create(rule, key_id=key.id, who=caller)
        shown = _present(alert)
    response.headers["Location"] = f"/alerts/{shown.id}"
    return AlertMade(**dict(shown), secret=key.secret(shown.id))


@router.get("", summary="List what is watched")
def list_alerts(database: DatabaseDependency) -> AlertsOut:
    with database.read() as session:
        return AlertsOut(alerts=[_present(alert) for alert in AlertRepository(session).list()])


@router.get("/{alert_id}", summary="Read one alert")
def read_alert(alert_id: AlertId, database: DatabaseDependency) -> AlertOut:
    with database.read() as session:
        return _present(AlertRepository(session).get(alert_id))


@router.delete("/{alert_id}", status_code=204, summary="Watch no more; what is not delivered is not sent")
def delete_alert(alert_id: AlertId, caller: CallerDependency, database: DatabaseDependency) -> None:
    with database.write() as session:
        AlertRepository(session).delete(alert_id, who=caller)


@router.post("/{alert_id}/test", status_code=202, summary="Send a message that is about no run")
def send_test(
    alert_id: AlertId, caller: CallerDependency, database: DatabaseDependency, controller: ControllerDependency
) -> DeliveryOut:
    """The answer shows the message as it is queued; how it went is in the alert's deliveries."""
    with database.write() as session:
        alerts = AlertRepository(session)
        alert, uid = alerts.get(alert_id), new_uid()
        body = message(uid, alert, None, what="test", why=f"a test, asked for by {caller}",
                       at=read_clock(session).isoformat())  # fmt: skip
        row = alerts.post(alert, run_uid="", occurrence=f"test-{uid}", body=body, uid=uid)
        assert row is not None
        shown = _present_delivery(row)
    controller.wake()
    return shown


@router.get("/{alert_id}/deliveries", summary="List what was sent, newest first")
def list_deliveries(
    alert_id: AlertId,
    database: DatabaseDependency,
    before: Annotated[int | None, Query(ge=0, lt=2**62, description="`next_before` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> DeliveriesOut:
    with database.read() as session:
        alerts = AlertRepository(session)
        rows = alerts.deliveries(alerts.get(alert_id), before=before, limit=limit + 1)
    page = rows[:limit]
    return DeliveriesOut(
        deliveries=[_present_delivery(row) for row in page], next_before=page[-1].id if len(rows) > limit else None
    )


def _signing_key(settings: Settings) -> SigningKey:
    path = settings.effective_alert_key_file
    try:
        return SigningKey.load(path)
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"the alerts' signing key cannot be read: {error}", remedy=f"make {path} readable, or remove it"
        ) from error


def _present(alert: Alert) -> AlertOut:
    return AlertOut.model_validate(
        {
            "id": alert.uid,
            "name": alert.name,
            "url": shown_url(alert.url),
            "when": alert.condition,
            "tag": alert.tag,
            "who": alert.who,
            "created_at": alert.created_at,
        }
    )


def _present_delivery(row: AlertDelivery) -> DeliveryOut:
    return DeliveryOut(
        id=row.uid,
        run_id=row.run_uid or None,
        status=row.status,
        attempts=row.attempts,
        next_try_at=row.next_try_at,
        response_code=row.response_code,
        response=row.response,
        error=row.error,
        body=row.body,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )
