"""Alerts: what the leading controller tells, and how it sees to it that it is told.

    evaluate   in the tick's own transaction: what happened since each rule last looked becomes messages, once each
    deliver    after the commit: due messages are sent, and what became of each is written down

A message is a row before anything is sent, and stays due until its receiver has taken it: a controller that is killed
in between, or the one that takes over, sends it again under the same id.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter

from muonscope.contract.alerts import (
    Condition,
    DiscardedShareCondition,
    SilenceCondition,
    StatusCondition,
    VerdictCondition,
)
from muonscope.contract.status import DeliveryStatus
from service.alert_messages import message
from service.controller.leadership import Leadership, NotLeading
from service.errors import ServiceError
from service.settings import Settings
from service.store.alerts import AlertRepository
from service.store.events import EventRepository
from service.store.models import Alert, Run
from service.store.runs import RunRepository, new_uid
from service.store.session import Database, Session
from service.store.types import read_clock
from service.webhooks import Answer, Sender, SigningKey

logger = logging.getLogger(__name__)

# A tick is one transaction, and a request that writes waits for it.
MESSAGES_A_RULE: Final = 50
IN_FLIGHT: Final = 16
# A receiver that is slow keeps others waiting for so many places at most.
IN_FLIGHT_A_RULE: Final = 2
LONGEST_PAUSE_S: Final = 3600.0
_CONDITION: Final[TypeAdapter[Condition]] = TypeAdapter(Condition)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Something a rule tells of a run."""

    run: Run
    key: str
    """Unique for the rule and the run: what has been told is not told again."""
    what: str
    """The event's type in the message: `run.failed`, `run.verdict`."""
    why: str


class Evaluator:
    """Turns what happened into messages."""

    def evaluate(self, session: Session, *, with_silence: bool = True) -> bool:
        """Look on from where each rule has looked before, in the caller's transaction.

        Args:
            session: a writing one of the leader.
            with_silence: whether steps could have been stored lately: not right after a controller began to lead.
        Returns:
            Whether there is more to look at than one tick takes on.
        """
        alerts = AlertRepository(session)
        rules = alerts.list()
        if not rules:
            return False
        # What this transaction has changed itself is looked at too.
        session.flush()
        newest_event, newest_revision = EventRepository(session).last_id(), RunRepository(session).last_revision()
        more = False
        for rule in rules:
            try:
                condition = _CONDITION.validate_python(rule.condition)
            except ValueError as error:
                # A newer version's, perhaps: it must not keep the queue from its tick.
                logger.error("alert %s cannot be read: %s", rule.uid, error, extra={"action": "alert_unreadable"})
                continue
            found = list(self._find(alerts, rule, condition, with_silence))
            is_cut = len(found) == MESSAGES_A_RULE
            for each in found:
                uid = new_uid()
                body = message(uid, rule, each.run, what=each.what, why=each.why, at=read_clock(session).isoformat())
                alerts.post(rule, run_uid=each.run.uid, occurrence=each.key, body=body, uid=uid)
            self._advance(rule, condition, found, is_cut, newest_event, newest_revision)
            more |= is_cut
        return more

    def _find(
        self, alerts: AlertRepository, rule: Alert, condition: Condition, with_silence: bool
    ) -> Iterator[Occurrence]:
        match condition:
            case VerdictCondition():
                for event in alerts.events_after(rule, "verdict", condition.verdicts, MESSAGES_A_RULE):
                    assert event.run is not None
                    yield Occurrence(event.run, f"event-{event.id}", "run.verdict", f"{event.to_status}: {event.why}")
            case StatusCondition():
                for event in alerts.events_after(rule, "run_status", condition.statuses, MESSAGES_A_RULE):
                    assert event.run is not None
                    yield Occurrence(event.run, f"event-{event.id}", f"run.{event.to_status}", event.why)
            case DiscardedShareCondition(share=share, after_steps=after):
                for run in alerts.discarding(rule, share, after, MESSAGES_A_RULE):
                    count = f"{run.summary.discarded} of {run.summary.steps} steps were discarded"
                    yield Occurrence(run, "share", "run.discarded_share", f"{count}, more than {share:g} of them")
            case SilenceCondition(seconds=seconds):
                if not with_silence:
                    return
                for attempt in alerts.silent(rule, seconds, MESSAGES_A_RULE):
                    since = "its start" if attempt.stepped_at is None else f"step {attempt.next_step - 1}"
                    yield Occurrence(
                        attempt.run, f"silence-{attempt.number}-{attempt.next_step}", "run.silent",
                        f"no step was stored for {seconds:g} s since {since}",
                    )  # fmt: skip

    def _advance(
        self, rule: Alert, condition: Condition, found: list[Occurrence], is_cut: bool,
        newest_event: int, newest_revision: int,
    ) -> None:  # fmt: skip
        if isinstance(condition, VerdictCondition | StatusCondition):
            rule.seen_event = int(found[-1].key.removeprefix("event-")) if is_cut else newest_event
        elif isinstance(condition, DiscardedShareCondition):
            rule.seen_revision = found[-1].run.revision if is_cut else newest_revision


def pauses(settings: Settings) -> dict[int, float]:
    """Return the pause after each attempt that is not the last, by its number."""
    first = settings.alert_backoff_s
    return {
        number: min(first * 2 ** min(number - 1, 20), LONGEST_PAUSE_S) for number in range(1, settings.alert_attempts)
    }


class Deliverer:
    """Sends due messages, some at a time, and writes down what became of them."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        leadership: Leadership | None = None,
        sender: Sender | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._settings = settings
        self._leadership = leadership
        self._sender = sender or Sender(settings)
        self._wall_clock = wall_clock
        self._pauses = pauses(settings)
        self._in_flight: dict[str, int] = {}
        """The rule's row id of each message that is being sent."""

    def due(self) -> list["Message"]:
        """Take on what is due and not being sent yet, within the limits. Blocks."""
        # Before the read: what is recorded and let go of during it is among its rows still, and was sent.
        sent = set(self._in_flight)
        with self._database.read() as session:
            rows = [
                Message(row.uid, row.alert_id, row.alert.uid, row.alert.url, row.alert.key_id, row.body.encode())
                for row in AlertRepository(session).due(20 * IN_FLIGHT)
            ]
        taken: list[Message] = []
        busy = Counter(self._in_flight.values())
        for row in rows:
            if row.uid in sent or busy[row.alert_id] >= IN_FLIGHT_A_RULE:
                continue
            if len(self._in_flight) >= IN_FLIGHT:
                break
            busy[row.alert_id] += 1
            self._in_flight[row.uid] = row.alert_id
            taken.append(row)
        return taken

    async def deliver(self, row: "Message") -> None:
        """Send one message and record the answer; whatever goes wrong, it stays due or is recorded."""
        try:
            answer = await self._send(row)
            await asyncio.to_thread(self._record, row.uid, answer)
        except (ServiceError, NotLeading) as error:
            logger.warning("message %s: %s", row.uid, error, extra={"action": "alert_unrecorded"})
        finally:
            self._in_flight.pop(row.uid, None)

    async def _send(self, row: "Message") -> Answer:
        try:
            key = await asyncio.to_thread(SigningKey.load, self._settings.effective_alert_key_file)
        except (OSError, ValueError) as error:
            return Answer(error=f"the signing key cannot be read: {error}")
        if key.id != row.key_id:
            return Answer(
                error="the alert was made under another signing key: give all controllers of this database the same "
                "MUONSCOPE_ALERT_KEY_FILE, or make the alert anew"
            )
        headers = key.headers(row.alert_uid, row.uid, int(self._wall_clock()), row.body)
        return await self._sender.send(row.url, row.body, headers)

    def _record(self, uid: str, answer: Answer) -> None:
        with self._database.write() as session:
            if self._leadership is not None:
                self._leadership.confirm(session)
            row = AlertRepository(session).record(
                uid, code=answer.code, text=answer.text, error=answer.error, pause_s=self._pauses
            )
        if row is not None and row.status is DeliveryStatus.GIVEN_UP:
            logger.error(
                "message %s was given up after %d attempts: %s", uid, row.attempts, answer.error,
                extra={"action": "alert_given_up"},
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it is sent."""

    uid: str
    alert_id: int
    alert_uid: str
    url: str
    key_id: str
    body: bytes
