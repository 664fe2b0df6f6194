"""Counts over the whole store, for monitoring and above the run table: each one query, none of which reads a step."""

from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from muonscope.contract.status import AttemptStatus, RunStatus, Verdict
from service.store import search
from service.store.models import Attempt, Event, Run, RunSummary


@dataclass(frozen=True, slots=True)
class Census:
    runs: dict[RunStatus, int]
    verdicts: dict[Verdict, int]
    attempts: dict[AttemptStatus, int]
    steps: int
    """Stored of all runs that are there, rank 0's rows."""
    alarms: int
    gaps: int
    database_bytes: int


def take_census(session: Session) -> Census:
    """Count runs, attempts, steps and what went wrong."""
    runs, verdicts = dict.fromkeys(RunStatus, 0), dict.fromkeys(Verdict, 0)
    attempts = dict.fromkeys(AttemptStatus, 0)
    for status, count in session.execute(select(Run.status, func.count()).group_by(Run.status)):
        runs[status] = count
    for verdict, count in session.execute(select(Run.verdict, func.count()).group_by(Run.verdict)):
        if verdict is not None:
            verdicts[verdict] = count
    steps = 0
    for state, count, stored in session.execute(
        select(Attempt.status, func.count(), func.sum(Attempt.stored_steps)).group_by(Attempt.status)
    ):
        attempts[state] = count
        steps += int(stored)
    told = select(Event.kind, func.count()).where(Event.kind.in_(("alarm", "gap"))).group_by(Event.kind)
    wrong: dict[str, int] = {}
    for kind, count in session.execute(told):
        wrong[kind] = count
    return Census(runs, verdicts, attempts, steps, wrong.get("alarm", 0), wrong.get("gap", 0), _size(session))


@dataclass(frozen=True, slots=True)
class RunCounts:
    total: int
    statuses: dict[RunStatus, int]
    verdicts: dict[Verdict, int]


def count_runs(session: Session, q: str = "") -> RunCounts:
    """Count the runs that a search finds, by status and by verdict.

    Raises:
        InvalidInput: a search that is none, as `search.py` says.
    """
    query = select(Run.status, Run.verdict, func.count()).join(RunSummary, RunSummary.run_id == Run.id)
    query = query.where(*search.conditions(q)).group_by(Run.status, Run.verdict)
    statuses, verdicts = dict.fromkeys(RunStatus, 0), dict.fromkeys(Verdict, 0)
    for status, verdict, count in session.execute(query):
        statuses[status] += count
        if verdict is not None:
            verdicts[verdict] += count
    return RunCounts(sum(statuses.values()), statuses, verdicts)


def _size(session: Session) -> int:
    if session.get_bind().dialect.name == "sqlite":
        pages = session.execute(text("PRAGMA page_count")).scalar_one()
        return int(pages) * int(session.execute(text("PRAGMA page_size")).scalar_one())
    return int(session.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
