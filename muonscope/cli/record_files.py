"""Reads record files: databases of this program's own, with runs that ended where no service was."""

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from muonscope.cli.stores import store_errors
from muonscope.client.deepspeed_csv import ImportFailed
from muonscope.contract.attempts import AttemptFacts, AttemptOutcome, Failure, FinalState, ParameterFact
from muonscope.contract.recordings import RECORD_BATCH_STEPS, RunRecord
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus
from muonscope.contract.telemetry import encode_batch, encode_record
from service.settings import sqlite_url
from service.store import migrate
from service.store.models import Parameter, Run
from service.store.parameters import ParameterRepository
from service.store.runs import RunRepository
from service.store.session import Database, Session
from service.store.steps import StepRepository, reached

_MAGIC: Final = b"SQLite format 3\x00"
_OUTCOMES: Final = {
    RunStatus.SUCCEEDED: AttemptStatus.SUCCEEDED,
    RunStatus.FAILED: AttemptStatus.FAILED,
    RunStatus.STOPPED: AttemptStatus.STOPPED,
}


def read_records(path: Path, tell: Callable[[str], None]) -> Iterator[RunRecord]:
    """Yield each run of a record file that has ended, oldest first.

    Args:
        path: the file.
        tell: hears of runs that are passed over.
    Raises:
        ImportFailed: no record file, or one of another version's schema.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ImportFailed(path, "is no record file", remedy="give a record file, or a monitor's folder")
    with store_errors(), _opened(path) as database:
        _refuse_other_schema(database, path)
        with database.read() as session:
            for run in _runs(session):
                if not run.status.is_terminal or not run.attempts:
                    tell(f"{run.uid} ({run.name}) is {run.status}: not imported")
                    continue
                yield read_record(session, run)


@contextmanager
def _opened(path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(path))
    try:
        yield database
    finally:
        database.dispose()


def read_record(session: Session, run: Run) -> RunRecord:
    """Gather one run; of several attempts the current record up to where it came, as if one had made it."""
    attempt = run.attempts[-1]
    steps = (current.record for current in StepRepository(session).walk(run, stop=reached(run)))
    batches, count = [], 0
    while chunk := [encode_record(record) for record in islice(steps, RECORD_BATCH_STEPS)]:
        batches.append(base64.b64encode(encode_batch(chunk, epoch=0)).decode())
        count += len(chunk)
    failure = None
    if run.status is RunStatus.FAILED:
        failure = Failure(
            kind=run.failure_kind or FailureKind.TASK_ERROR, rank=run.failure_rank, step=run.failure_step,
            message=run.failure_message or "",
        )  # fmt: skip
    return RunRecord(
        id=run.uid,
        spec=RunSpec.model_validate(run.spec),
        facts=AttemptFacts.model_validate(
            {
                "phases": attempt.phases,
                "parameters": [_fact(each) for each in ParameterRepository(session).list(run)],
                "ranks": attempt.ranks,
                "momentum_unit": attempt.momentum_unit,
                "data_hash": attempt.data_hash,
                "initial_parameters_hash": attempt.initial_parameters_hash,
                "environment": attempt.environment,
                "resolved_ds_config": attempt.resolved_ds_config,
            }
        ),
        outcome=AttemptOutcome(
            status=_OUTCOMES[run.status],
            declared_steps=count,
            failure=failure,
            final=None if attempt.final is None else FinalState.model_validate(attempt.final),
        ),
        batches=batches,
    )


def _fact(row: Parameter) -> ParameterFact:
    return ParameterFact(index=row.index, name=row.name, shape=tuple(row.shape), route=row.route, reason=row.reason)


def _runs(session: Session) -> Iterator[Run]:
    runs, cursor = RunRepository(session), None
    while True:
        page = runs.list(sort="created_at", cursor=cursor, limit=1000)
        yield from page.runs
        cursor = page.next_cursor
        if cursor is None:
            return


def _refuse_other_schema(database: Database, path: Path) -> None:
    found, known = migrate.read_revisions(database)
    if found is None:
        raise ImportFailed(path, "holds no record", remedy="give a record file or a folder")
    if found != known:
        raise ImportFailed(
            path, f"has the schema {found}, and this version's is {known}",
            remedy=f"`muonscope db upgrade --database-url sqlite:///{path}` brings it up; a newer one needs its own "
            "version of Muonscope",
        )  # fmt: skip
