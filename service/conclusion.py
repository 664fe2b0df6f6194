"""The end of an attempt, in one transaction: its status, what becomes of its run, and what the record proves.

Both the workers' outcome (`api`) and an end that the controller finds (`controller`) go through here; it stands
between them and the two rooms it joins, the store and the analysis, which do not know each other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from muonscope.contract.attempts import AttemptOutcome, Failure, FinalState
from muonscope.contract.spec_facts import has_muon_optimizer
from muonscope.contract.status import AttemptStatus, FailureKind, RunStatus
from service.analysis import verdicts
from service.columns import StepColumns
from service.recordings import is_open_ended, is_recording
from service.store.attempts import AttemptRepository
from service.store.events import EventRepository
from service.store.models import Attempt, Run
from service.store.nonfinite import PARAMETER_SCALAR, WHOLE_MODEL, NonfiniteRepository
from service.store.parameters import ParameterRepository
from service.store.runs import Legal, RunRepository
from service.store.session import Session
from service.store.steps import StepRepository, reached

RetryReason = Callable[[Failure | None, int], str | None]
"""Why a run whose attempt of this number ended so gets another one; None: it does not."""

_RUN_STATUS: Final = {
    AttemptStatus.SUCCEEDED: RunStatus.SUCCEEDED,
    AttemptStatus.FAILED: RunStatus.FAILED,
    AttemptStatus.LOST: RunStatus.FAILED,
    AttemptStatus.STOPPED: RunStatus.STOPPED,
}


def accept_outcome(
    session: Session, attempt: Attempt, outcome: AttemptOutcome, *, legal: Legal, retry_reason: RetryReason
) -> Run:
    """Close an attempt as its workers report it; a success whose record is incomplete is a failure.

    Returns:
        The run, in its new status.
    """
    # Where the checkpoint asked for was damaged, the workers began at an earlier one.
    attempt.first_step = min(attempt.first_step, outcome.first_step)
    AttemptRepository(session).record_outcome(attempt, outcome)
    status, failure = outcome.status, outcome.failure
    missing = missing_steps(attempt, outcome)
    if missing is not None and status is AttemptStatus.SUCCEEDED:
        status, failure = AttemptStatus.FAILED, Failure(kind=FailureKind.RECORD_INCOMPLETE, message=missing)
    return close_attempt(
        session, attempt, status, failure=failure, legal=legal, retry_reason=retry_reason,
        who="workers", why=failure.message or str(failure.kind) if failure is not None else "outcome reported",
    )  # fmt: skip


def missing_steps(attempt: Attempt, outcome: AttemptOutcome) -> str | None:
    """Say what is missing of the record that the workers declare; None where it is complete."""
    span = attempt.next_step - attempt.first_step
    if outcome.declared_steps != attempt.stored_steps:
        return f"the workers recorded {outcome.declared_steps} steps and {attempt.stored_steps} are stored"
    if span != attempt.stored_steps:
        return f"of steps {attempt.first_step} to {attempt.next_step - 1}, {span - attempt.stored_steps} are missing"
    return None


def close_attempt(
    session: Session,
    attempt: Attempt,
    status: AttemptStatus,
    *,
    legal: Legal,
    retry_reason: RetryReason,
    who: str,
    why: str,
    failure: Failure | None = None,
) -> Run:
    """End a live attempt and decide what becomes of its run: retried, or over with a verdict.

    A run that was asked to stop is stopped, however its attempt ended; only a complete success stands above that.

    Args:
        session: a writing one; nothing is committed here.
        attempt: as AttemptRepository loads it, not yet ended.
        status: a terminal one.
        legal: the run's legal transitions.
        retry_reason: the retry policy.
        who: who found the end.
        why: what it was.
        failure: of a failed or lost attempt.
    Returns:
        The run, in its new status.
    """
    runs = RunRepository(session)
    AttemptRepository(session).set_status(attempt, status, who=who, why=why, failure=failure)
    session.flush()
    run = runs.get(attempt.run.uid)
    to = _RUN_STATUS[status]
    if run.stop_requested and to is RunStatus.FAILED:
        to = RunStatus.STOPPED
    may_repeat = to is RunStatus.FAILED and not is_recording(run)
    if may_repeat and (reason := retry_reason(failure, attempt.number)) is not None:
        runs.set_status(run, RunStatus.QUEUED, legal=legal, who=who, why=reason)
        return run
    kept = failure if to is RunStatus.FAILED else None
    runs.set_status(run, to, legal=legal, who=who, why=why, failure=kept)
    judge_run(session, run)
    return run


def judge_run(session: Session, run: Run) -> None:
    """Read a finished run's record and keep the verdicts and findings it proves; one without any attempt has none."""
    if not run.attempts:
        return
    record = read_record(session, run)
    RunRepository(session).set_findings(run, [found.as_json() for found in verdicts.judge(record)])
    if run.verdict is not None:
        EventRepository(session).append(
            "verdict", run=run, to_status=run.verdict, who="controller", why=run.verdict_evidence or ""
        )


def read_record(session: Session, run: Run) -> verdicts.RunRecord:
    """Gather what `judge` rests on from the run's current record, up to the step that the run came to."""
    columns = StepRepository(session).columns(run, verdicts.SERIES, stop=reached(run))
    names = {parameter.index: parameter.name for parameter in ParameterRepository(session).list(run)}
    trainable = [names.get(index, f"parameter {index}") for index in range(max(names, default=-1) + 1)]
    final = run.attempts[-1].final if run.attempts else None
    failure = None
    if run.failure_kind is not None:
        failure = Failure(
            kind=run.failure_kind, rank=run.failure_rank, step=run.failure_step, message=run.failure_message or ""
        )
    return verdicts.RunRecord(
        columns=columns,
        planned_steps=len(columns) if is_open_ended(run) else run.steps,
        status=run.status,
        failure=failure,
        final=FinalState.model_validate(final) if final is not None else None,
        poison=_first_poison(session, run, columns, names),
        absorption=verdicts.absorption(_discarded_norms(session, run, columns), int(columns.discarded.sum())),
        parameter_names=trainable,
        has_muon_optimizer=has_muon_optimizer(run.spec),
    )


def _first_poison(session: Session, run: Run, columns: StepColumns, names: dict[int, str]) -> verdicts.Poison | None:
    """Find where a parameter's momentum first turned non-finite in the run's current record."""
    recorded_by = dict(zip(columns.step.tolist(), columns.attempt.tolist(), strict=True))
    for found in NonfiniteRepository(session).list(run):
        at = found.transition
        of_a_parameter = at.scalar == PARAMETER_SCALAR and at.parameter != WHOLE_MODEL
        if of_a_parameter and at.kind and recorded_by.get(at.step) == found.attempt:
            return verdicts.Poison(at.step, names.get(at.parameter, f"parameter {at.parameter}"), at.kind)
    return None


def _discarded_norms(session: Session, run: Run, columns: StepColumns) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (step, norms before, norms after) of each discarded step whose norms were measured."""
    steps: Sequence[int] = columns.step[columns.discarded].tolist()
    repository = StepRepository(session)
    chunk = 500
    for place in range(0, len(steps), chunk):
        wanted = steps[place : place + chunk]
        norms = repository.norms_at(run, sorted({*wanted, *(step - 1 for step in wanted if step)}))
        for step in wanted:
            before, after = norms.get(step - 1, b""), norms.get(step, b"")
            # Step 0 follows initialisation: its momentum was zero.
            if after and (before or step == 0):
                yield step, before, after
