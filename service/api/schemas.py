"""The JSON of the API's nouns, and the one translation from rows to them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from muonscope.contract.attempts import Number, RankFact
from muonscope.contract.status import (
    AttemptStatus,
    FailureKind,
    MomentumUnit,
    RunStatus,
    Verdict,
)
from service.recordings import is_recording
from service.store.models import Attempt, Event, Run, RunSummary
from service.store.summary import get_scalar


class Out(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class FailureOut(Out):
    kind: FailureKind
    rank: int | None
    step: int | None
    message: str


class VerdictOut(Out):
    name: Verdict
    step: int | None
    """The first step that shows it; for `dies` the first that could not be recorded."""
    parameter: str | None
    evidence: str


class FindingOut(Out):
    name: str
    """A verdict, or a lesser finding such as `loss_rose`."""
    step: int | None = None
    parameter: str | None = None
    evidence: str | None = None


class SummaryOut(Out):
    steps: int
    """Attempted and stored, discarded ones included, up to the step that the run came to.

    Like verdicts and comparisons, all counts leave out what an earlier attempt recorded beyond that; `/steps` has it.
    """
    applied: int
    discarded: int
    overflows: int
    final_loss_scale: Number | None
    last_loss: Number | None
    last_momentum_norm: Number | None
    momentum_finite: bool | None
    parameters_moved: int | None
    parameters_total: int | None
    muon_parameters_moved: int | None
    muon_parameters_total: int | None
    max_weight_motion: Number | None
    """Largest 2-norm of (w - w0) over Muon-routed parameters."""


class AttemptOut(Out):
    id: str
    ray_job: str | None
    """The Ray job's submission id, which is the attempt's; null of a recorded script, which is no job."""
    number: int
    status: AttemptStatus
    failure: FailureOut | None
    phases: dict[str, float]
    """Unix seconds at which each phase ended."""
    ranks: list[RankFact]
    environment: dict[str, Any]
    momentum_unit: MomentumUnit | None
    data_hash: str | None
    initial_parameters_hash: str | None
    resolved_ds_config: dict[str, Any] | None
    final: dict[str, Any] | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    heartbeat_at: datetime | None
    silent_ranks: list[int]
    first_step: int
    declared_steps: int | None
    stored_steps: int


class RunOut(Out):
    id: str
    name: str
    spec: dict[str, Any]
    fingerprint: str
    status: RunStatus
    stop_requested: bool
    waiting_reason: str | None
    queue_position: int | None
    """From 1; null unless queued."""
    failure: FailureOut | None
    verdict: VerdictOut | None
    findings: list[FindingOut]
    attempts: list[AttemptOut]
    summary: SummaryOut
    experiment_id: str | None
    tags: list[str]
    priority: int
    submitted_by: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class RunsOut(Out):
    runs: list[RunOut]
    next_cursor: str | None


class ValidRunOut(Out):
    """A spec that would be accepted now, as it would be stored."""

    spec: dict[str, Any]
    fingerprint: str


class RunCountsOut(Out):
    total: int
    statuses: dict[RunStatus, int]
    verdicts: dict[Verdict, int]
    """Runs that have none are in no verdict's count."""


class EventOut(Out):
    id: int
    run_id: str | None
    attempt: int | None
    at: datetime
    kind: str
    from_status: str | None
    to_status: str | None
    who: str
    why: str
    detail: dict[str, Any] | None


class EventsOut(Out):
    events: list[EventOut]


class NodeOut(Out):
    id: str
    address: str
    gpus: float
    gpus_used: float | None
    cpus: float
    memory_bytes: float


class HolderOut(Out):
    run_id: str
    name: str
    attempt: str
    status: RunStatus
    gpus: float


class ClusterOut(Out):
    address: str
    reachable: bool
    problem: str | None
    gpus: float
    gpus_are_logical: bool | None
    """Whether they are places on a machine that has none; null of a Ray that this service has not started."""
    gpus_held: float
    """By runs of this service."""
    nodes: list[NodeOut]
    holders: list[HolderOut]
    queued: int


class FieldProblem(Out):
    detail: str
    field: str | None
    value: Any
    remedy: str | None


class Problem(Out):
    """RFC 9457; `field`, `value` and `remedy` say what to change."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None
    value: Any
    remedy: str | None
    errors: list[FieldProblem] = []
    """All that is wrong, where it is more than one thing; the members above are the first of them."""


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "content": {"application/problem+json": {}}}
    for status in (400, 401, 403, 404, 408, 409, 413, 415, 421, 422, 429, 503)
}


# What an operation says that answers a repeat with the run it made the first time.
REPEATED: dict[int | str, dict[str, Any]] = {
    200: {"model": RunOut, "description": "A repeat: the run of the first time."}
}


def present_run(run: Run, positions: Mapping[str, int] | None = None) -> RunOut:
    """Translate a run as RunRepository loads it; `positions` are those of `queue_positions`."""
    return RunOut(
        id=run.uid,
        name=run.name,
        spec=run.spec,
        fingerprint=run.fingerprint,
        status=run.status,
        stop_requested=run.stop_requested,
        waiting_reason=run.waiting_reason,
        queue_position=(positions or {}).get(run.uid),
        failure=present_failure(run),
        verdict=_present_verdict(run),
        findings=[FindingOut.model_validate(finding) for finding in run.findings],
        attempts=[present_attempt(run, attempt) for attempt in run.attempts],
        summary=present_summary(run.summary),
        experiment_id=run.experiment.uid if run.experiment is not None else None,
        tags=[row.tag for row in run.tags],
        priority=run.priority,
        submitted_by=run.submitted_by,
        created_at=run.created_at,
        started_at=run.started_at,
        finished_at=run.finished_at,
    )


def present_runs(runs: Sequence[Run], positions: Mapping[str, int]) -> list[RunOut]:
    return [present_run(run, positions) for run in runs]


Failed = TypeVar("Failed", Run, Attempt)


def present_failure(row: Failed) -> FailureOut | None:
    if row.failure_kind is None:
        return None
    return FailureOut(
        kind=row.failure_kind, rank=row.failure_rank, step=row.failure_step, message=row.failure_message or ""
    )


def _present_verdict(run: Run) -> VerdictOut | None:
    if run.verdict is None:
        return None
    return VerdictOut(
        name=run.verdict, step=run.verdict_step, parameter=run.verdict_parameter, evidence=run.verdict_evidence or ""
    )


def present_summary(summary: RunSummary) -> SummaryOut:
    return SummaryOut(
        steps=summary.steps,
        applied=summary.steps - summary.discarded,
        discarded=summary.discarded,
        overflows=summary.overflows,
        final_loss_scale=get_scalar(summary, "final_loss_scale"),
        last_loss=get_scalar(summary, "last_loss"),
        last_momentum_norm=get_scalar(summary, "last_momentum_norm"),
        momentum_finite=summary.momentum_finite,
        parameters_moved=summary.parameters_moved,
        parameters_total=summary.parameters_total,
        muon_parameters_moved=summary.muon_parameters_moved,
        muon_parameters_total=summary.muon_parameters_total,
        max_weight_motion=get_scalar(summary, "max_weight_motion"),
    )


def present_attempt(run: Run, attempt: Attempt) -> AttemptOut:
    return AttemptOut(
        id=attempt.submission_id,
        ray_job=None if is_recording(run) else attempt.submission_id,
        number=attempt.number,
        status=attempt.status,
        failure=present_failure(attempt),
        phases=attempt.phases,
        ranks=[RankFact.model_validate(rank) for rank in attempt.ranks],
        environment=attempt.environment,
        momentum_unit=attempt.momentum_unit,
        data_hash=attempt.data_hash,
        initial_parameters_hash=attempt.initial_parameters_hash,
        resolved_ds_config=attempt.resolved_ds_config,
        # Weights are kept for the experiments' distances; nobody reads them as text.
        final=None if attempt.final is None else {k: v for k, v in attempt.final.items() if k != "weights"},
        created_at=attempt.created_at,
        started_at=attempt.started_at,
        finished_at=attempt.finished_at,
        heartbeat_at=attempt.heartbeat_at,
        silent_ranks=attempt.silent_ranks,
        first_step=attempt.first_step,
        declared_steps=attempt.declared_steps,
        stored_steps=attempt.stored_steps,
    )


def present_event(event: Event) -> EventOut:
    return EventOut(
        id=event.id,
        run_id=event.run.uid if event.run is not None else None,
        attempt=event.attempt,
        at=event.at,
        kind=event.kind,
        from_status=event.from_status,
        to_status=event.to_status,
        who=event.who,
        why=event.why,
        detail=event.detail,
    )
