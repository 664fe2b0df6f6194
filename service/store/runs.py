"""Runs: accepted once, found by search, moved only along legal transitions, each change an event."""

import base64
import hashlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select, update
from sqlalchemy.orm import Session, joinedload, selectinload

from muonscope.contract.attempts import Failure
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import Implementation, Precision, RunStatus, Verdict
from service.errors import Conflict, IllegalTransition, InvalidInput, NotFound
from service.store import search
from service.store.alert_models import Alert
from service.store.events import EventRepository
from service.store.models import Event, Experiment, QueueEntry, Run, RunSummary, RunTag
from service.store.queue import QueueRepository
from service.store.types import read_clock, storable_text

Legal = Mapping[RunStatus, Collection[RunStatus]]
"""From each status, those it may change to. The table itself is the controller's."""

MAX_PAGE: Final = 1000
MAX_KEY_LENGTH: Final = 255
_ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"


def imported_key(record_id: str) -> str:
    """Return the idempotency key of the run that a record of this id, made elsewhere, becomes here."""
    return f"imported:{storable_text(record_id)}"


def _rank_of(column: Any, words: Sequence[str]) -> ColumnElement[int]:
    return case({word: place for place, word in enumerate(words)}, value=column)


SORTABLE: Final[dict[str, ColumnElement[Any]]] = {
    "created_at": Run.created_at.expression,
    "started_at": Run.started_at.expression,
    "finished_at": Run.finished_at.expression,
    "name": Run.name.expression,
    "task": Run.task.expression,
    "status": _rank_of(Run.status, list(RunStatus)),
    "verdict": _rank_of(Run.verdict, list(Verdict)),
    "step_ordering": Run.step_ordering.expression,
    "implementation": Run.implementation.expression,
    "zero_stage": Run.zero_stage.expression,
    "world_size": Run.world_size.expression,
    "initial_scale": Run.initial_scale.expression,
    "priority": Run.priority.expression,
    "steps": RunSummary.steps.expression,
    "discarded": RunSummary.discarded.expression,
    "overflows": RunSummary.overflows.expression,
    "final_loss_scale": RunSummary.final_loss_scale.expression,
    "last_loss": RunSummary.last_loss.expression,
    "last_momentum_norm": RunSummary.last_momentum_norm.expression,
    "max_weight_motion": RunSummary.max_weight_motion.expression,
    "parameters_moved": RunSummary.parameters_moved.expression,
}


@dataclass(frozen=True, slots=True)
class RunPage:
    runs: Sequence[Run]
    next_cursor: str | None


def new_uid() -> str:
    """Make an opaque id: 12 characters of base32, 60 random bits."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(12))


# Built once: every change asks it, and building a statement costs more than running it.
_LAST_REVISION: Final = select(func.coalesce(func.max(Run.revision), 0))


class RunRepository:
    """All that is asked of runs. Those it returns have attempts, summary, tags and experiment loaded."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # -- accepting --------------------------------------------------------------------------------------------------

    def create(
        self,
        spec: RunSpec,
        *,
        idempotency_key: str | None = None,
        experiment: Experiment | None = None,
        position: int | None = None,
        who: str = "api",
        why: str = "submitted",
        submitted_by: str | None = None,
    ) -> tuple[Run, bool]:
        """Queue a run, once per idempotency key.

        Returns:
            The run, and whether this call made it: a repeat with an equal spec gives the first one.
        Raises:
            Conflict: the key was used for another spec.
            InvalidInput: the key is empty or too long.
        """
        spec = stated(spec)
        document = spec.model_dump(mode="json")
        request_hash = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        earlier = None if idempotency_key is None else self._made_before(idempotency_key, request_hash)
        if earlier is not None:
            return earlier, False
        run = Run(
            uid=new_uid(),
            experiment_id=experiment.id if experiment is not None else None,
            position=position,
            spec=document,
            idempotency_key=idempotency_key,
            request_hash=request_hash if idempotency_key is not None else None,
            status=RunStatus.QUEUED,
            findings=[],
            revision=self._next_revision(),
            created_at=read_clock(self._session),
            submitted_by=submitted_by,
            **_searched(spec),
        )
        run.summary = RunSummary()
        run.tags = [RunTag(position=place, tag=tag) for place, tag in enumerate(spec.tags)]
        run.attempts = []
        run.experiment = experiment
        self._session.add(run)
        self._session.flush()
        QueueRepository(self._session).enter(run, is_new=True)
        EventRepository(self._session).append(
            "run_status", run=run, to_status=run.status, who=who, why=why, at=run.created_at
        )
        return run, True

    def _made_before(self, key: str, request_hash: str) -> Run | None:
        """Return the run that this key was used for; raises Conflict where that was another request."""
        earlier = self.find_by_key(key)
        if earlier is not None and earlier.request_hash != request_hash:
            raise Conflict(
                f"the idempotency key was used for run {earlier.uid}, whose spec differs",
                field="Idempotency-Key",
                value=key,
                remedy="send a new key with a new spec",
            )
        return earlier

    def find_by_key(self, key: str) -> Run | None:
        """Return the run that was made under an idempotency key; raises InvalidInput for what is none."""
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise InvalidInput(
                f"the idempotency key has {len(key)} characters",
                field="Idempotency-Key",
                value=key,
                remedy=f"use 1 to {MAX_KEY_LENGTH} characters",
            )
        return self._session.scalars(_loaded().where(Run.idempotency_key == key)).one_or_none()

    # -- finding ----------------------------------------------------------------------------------------------------

    def find(self, uid: str) -> Run | None:
        return self._session.scalars(_loaded().where(Run.uid == storable_text(uid))).one_or_none()

    def get(self, uid: str) -> Run:
        """Return the run of this id; raises NotFound, which names the run that a record of this id was imported as."""
        run = self.find(uid)
        if run is not None:
            return run
        imported = self.find_by_key(imported_key(uid[:64]))
        if imported is not None:
            raise NotFound(
                f"there is no run {uid[:64]!r} here: its record was imported as run {imported.uid}",
                field="id", value=uid, remedy=f"ask for {imported.uid}",
            )  # fmt: skip
        raise NotFound(f"there is no run {uid[:64]!r}", field="id", value=uid, remedy="list them with GET /runs")

    def list(
        self,
        *,
        q: str = "",
        sort: str = "-created_at",
        cursor: str | None = None,
        limit: int = 50,
        experiment: Experiment | None = None,
    ) -> RunPage:
        """Return one page of runs, stable under inserts: pages follow the last row shown, not a row count.

        Args:
            q: a search, as `search.py` describes it.
            sort: a key of SORTABLE; `-` before it sorts descending. Missing values come last either way.
            cursor: `next_cursor` of the page before, taken with the same `q` and `sort`.
            limit: 1 to MAX_PAGE.
            experiment: only its runs.
        Raises:
            InvalidInput: a search, sort key, cursor or limit that is none.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidInput(
                f"limit={limit} is out of range", field="limit", value=limit, remedy=f"use 1 to {MAX_PAGE}"
            )
        key = sort.removeprefix("-")
        if key not in SORTABLE:
            raise InvalidInput(
                f"runs cannot be sorted by {key}",
                field="sort",
                value=sort,
                remedy=f"use one of {', '.join(sorted(SORTABLE))}, with - before it for descending",
            )
        column, descending = SORTABLE[key], sort.startswith("-")
        # Ids alone first: a database that sorts whole runs carries all their columns through the sort.
        query = select(Run.id, column).join(RunSummary, RunSummary.run_id == Run.id).where(*search.conditions(q))
        if experiment is not None:
            query = query.where(Run.experiment_id == experiment.id)
        if cursor is not None:
            query = query.where(_follows(column, descending, _read_cursor(cursor, sort)))
        order = (column.desc(), Run.id.desc()) if descending else (column.asc(), Run.id.asc())
        # Where nothing can be missing, an index may give the order.
        missing_last = [column.is_(None)] if getattr(column, "nullable", True) else []
        rows = self._session.execute(query.order_by(*missing_last, *order).limit(limit + 1)).all()
        page = rows[:limit]
        more = len(rows) > limit
        runs = self.by_ids([run_id for run_id, _ in page])
        next_cursor = _write_cursor(sort, page[-1][1], page[-1][0]) if more else None
        return RunPage([runs[run_id] for run_id, _ in page], next_cursor)

    def changed_after(self, revision: int, *, limit: int = 200) -> Sequence[Run]:
        """List runs changed after a revision, in the order of their last change."""
        return self._session.scalars(_loaded().where(Run.revision > revision).order_by(Run.revision).limit(limit)).all()

    def last_revision(self) -> int:
        return self._session.scalars(_LAST_REVISION).one()

    # -- the queue --------------------------------------------------------------------------------------------------

    def queued(self, *, limit: int | None = None) -> Sequence[Run]:
        """List queued runs in the order of the line."""
        place = (QueueEntry.rank, QueueEntry.run_id)
        query = _loaded().join(QueueEntry, QueueEntry.run_id == Run.id).where(QueueEntry.is_live.is_(False))
        return self._session.scalars(query.order_by(*place).limit(limit)).all()

    def by_ids(self, ids: Collection[int]) -> dict[int, Run]:
        """Return these runs by their row's id."""
        return {run.id: run for run in self._session.scalars(_loaded().where(Run.id.in_(ids)))}

    def live(self) -> Sequence[Run]:
        """List pending and running runs, oldest first."""
        live = (RunStatus.PENDING, RunStatus.RUNNING)
        return self._session.scalars(_loaded().where(Run.status.in_(live)).order_by(Run.id)).all()

    def queue_positions(self, runs: Sequence[Run]) -> dict[str, int]:
        """Return the place in the queue, from 1, of those of these runs that are queued, by uid."""
        wanted = {run.id: run.uid for run in runs if run.status is RunStatus.QUEUED}
        places = QueueRepository(self._session).positions(list(wanted)) if wanted else {}
        return {wanted[run_id]: place for run_id, place in places.items()}

    def count_by_status(self) -> dict[RunStatus, int]:
        counts = dict.fromkeys(RunStatus, 0)
        rows = self._session.execute(select(Run.status, func.count()).group_by(Run.status))
        for status, count in rows:
            counts[status] = count
        return counts

    # -- changing ---------------------------------------------------------------------------------------------------

    def set_status(
        self,
        run: Run,
        to: RunStatus,
        *,
        legal: Legal,
        who: str,
        why: str,
        failure: Failure | None = None,
    ) -> Event:
        """Move a run to another status and leave the event that says so.

        Queued again, a run loses its failure, verdict and stop request; a terminal status gets `finished_at`.

        Raises:
            IllegalTransition: the table does not hold this change, or another transaction changed the run first.
        """
        origin = run.status
        if to not in legal.get(origin, ()):
            raise IllegalTransition(
                f"run {run.uid} is {origin} and cannot become {to}",
                field="status",
                value=origin,
                remedy=f"from {origin} it can become: {', '.join(sorted(legal.get(origin, ()))) or 'nothing else'}",
            )
        self._session.flush()
        claimed = self._session.execute(
            update(Run).where(Run.id == run.id, Run.status == origin).values(status=to),
            execution_options={"synchronize_session": False},
        )
        if claimed.rowcount != 1:  # type: ignore[attr-defined]
            raise IllegalTransition(
                f"run {run.uid} was no longer {origin}", field="status", value=origin, remedy="read it again"
            )
        now = read_clock(self._session)
        run.status = to
        run.waiting_reason = None
        self._move_in_queue(run, origin)
        if to is RunStatus.QUEUED:
            run.stop_requested, run.finished_at = False, None
            _set_failure(run, None)
            run.verdict = run.verdict_step = run.verdict_parameter = run.verdict_evidence = None
            run.findings = []
        if to is RunStatus.RUNNING and run.started_at is None:
            run.started_at = now
        if to.is_terminal:
            run.finished_at = now
            _set_failure(run, failure)
        self.touch(run)
        return EventRepository(self._session).append(
            "run_status",
            run=run,
            from_status=origin,
            to_status=to,
            who=who,
            why=why,
            detail=failure.model_dump(mode="json") if failure is not None else None,
            at=now,
        )

    def _move_in_queue(self, run: Run, origin: RunStatus) -> None:
        queue = QueueRepository(self._session)
        if run.status.is_terminal:
            queue.leave(run)
        elif run.status is not RunStatus.QUEUED:
            queue.hold(run)
        else:
            # By policy a run goes back to its old place, after a pause; by a person's hand to the end, at once.
            last = run.attempts[-1] if run.attempts and not origin.is_terminal else None
            failed_at = last.finished_at if last is not None and last.failure_kind is not None else None
            queue.enter(run, attempts=len(run.attempts), failed_at=failed_at)

    def request_stop(self, run: Run, *, who: str, why: str = "stop requested") -> None:
        """Ask a live run's workers to stop; they learn it with their next heartbeat."""
        if not run.stop_requested:
            run.stop_requested = True
            self.touch(run)
            EventRepository(self._session).append("stop_requested", run=run, who=who, why=why)

    def set_findings(self, run: Run, findings: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the record proves: findings gravest first, of which the first that is a verdict is the run's.

        Args:
            run: the run.
            findings: {name, step, parameter, evidence}, name a Verdict or Finding.
        """
        verdicts = [finding for finding in findings if finding["name"] in set(Verdict)]
        gravest: Mapping[str, Any] = verdicts[0] if verdicts else {}
        run.verdict = Verdict(gravest["name"]) if gravest else None
        run.verdict_step = gravest.get("step")
        run.verdict_parameter = gravest.get("parameter")
        run.verdict_evidence = gravest.get("evidence")
        run.findings = [dict(finding) for finding in findings]
        self.touch(run)

    def touch(self, run: Run) -> None:
        """Give the run the newest revision, so that live views show it anew."""
        run.revision = self._next_revision()

    def keep_revisions(self, newest: int) -> None:
        """Have revisions go on from the newest there was, whose run was deleted: who has seen it waits for higher ones.

        The run that changed last before gets it, and is shown anew at most. Where none is left they begin again.
        """
        last = self.last_revision()
        if last == 0:
            self._session.execute(update(Alert).values(seen_revision=0))
        elif last < newest:
            self._session.execute(update(Run).where(Run.revision == last).values(revision=newest))

    def _next_revision(self) -> int:
        return self.last_revision() + 1


def stated(spec: RunSpec) -> RunSpec:
    """Say in the spec what it leaves to its implementation: a stored spec has no unset fields to tell a default by."""
    leaves_it = spec.gradient_clipping and "clip_scope" not in spec.model_fields_set
    if spec.implementation is Implementation.DEEPSPEED and leaves_it:
        return spec.model_copy(update={"clip_scope": "update"})
    return spec


def _searched(spec: RunSpec) -> dict[str, Any]:
    """Return what of a spec has columns of its own, for search and order."""
    return {
        "fingerprint": spec.fingerprint(),
        "name": spec.name,
        "task": spec.task.name,
        "step_ordering": spec.step_ordering,
        "implementation": spec.implementation,
        "zero_stage": spec.zero_stage,
        "world_size": spec.world_size,
        "steps": spec.steps,
        "initial_scale": initial_scale(spec),
        "priority": spec.priority,
    }


def initial_scale(spec: RunSpec) -> float | None:
    """Return the loss scale a run begins with, None where its precision has none."""
    if spec.precision is not Precision.FP16:
        return None
    return spec.loss_scale.static if spec.loss_scale.static is not None else float(2**spec.loss_scale.initial_power)


def _loaded() -> Select[Run]:
    return select(Run).options(
        joinedload(Run.summary), joinedload(Run.experiment), selectinload(Run.attempts), selectinload(Run.tags)
    )


def _set_failure(run: Run, failure: Failure | None) -> None:
    run.failure_kind = failure.kind if failure is not None else None
    run.failure_rank = failure.rank if failure is not None else None
    run.failure_step = failure.step if failure is not None else None
    run.failure_message = failure.message if failure is not None else None


def _follows(column: ColumnElement[Any], descending: bool, place: tuple[Any, int]) -> ColumnElement[bool]:
    value, run_id = place
    after_id = Run.id < run_id if descending else Run.id > run_id
    if value is None:
        return and_(column.is_(None), after_id)
    after_value = column < value if descending else column > value
    return or_(column.is_(None), after_value, and_(column == value, after_id))


def _write_cursor(sort: str, value: Any, run_id: int) -> str:
    kind = "at" if isinstance(value, datetime) else "is"
    plain = value.isoformat() if isinstance(value, datetime) else value
    return base64.urlsafe_b64encode(json.dumps([sort, kind, plain, run_id]).encode()).decode()


def _read_cursor(cursor: str, sort: str) -> tuple[Any, int]:
    try:
        cursor_sort, kind, value, run_id = json.loads(base64.urlsafe_b64decode(cursor.encode("ascii")))
        value = datetime.fromisoformat(value).astimezone(UTC) if kind == "at" else value
        fits = (
            isinstance(run_id, int)
            and abs(run_id) < 2**63
            and (value is None or _is_comparable(value, SORTABLE[sort.removeprefix("-")]))
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        fits, cursor_sort, value, run_id = False, None, None, 0
    if not fits or cursor_sort != sort:
        raise InvalidInput(
            "the cursor is none of this list's",
            field="cursor",
            value=cursor,
            remedy="take next_cursor of a page read with the same sort, or leave it out",
        )
    return value, run_id


def _is_comparable(value: Any, column: ColumnElement[Any]) -> bool:
    expected = column.type.python_type
    if expected is datetime:
        return isinstance(value, datetime)
    if expected in (int, float):
        largest = 2**63 if isinstance(value, int) else 2**1023
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < largest
    return isinstance(value, str)
