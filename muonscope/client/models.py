"""What the service answers, typed. Unknown keys are ignored, so that a newer service can be read."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from muonscope.contract.attempts import Failure, Number, ParameterFact
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, DeliveryStatus, MomentumUnit, RunStatus, Verdict

Item = TypeVar("Item")


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class RunFailure(Failure):
    """Why a run or an attempt failed."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RunVerdict(_Answer):
    """What a run's record proves, with the evidence."""

    name: Verdict
    step: int | None = None
    """The step the verdict hangs on; null where it is about the whole run."""
    parameter: str | None = None
    evidence: str = ""


class RunFinding(_Answer):
    """A verdict, or a lesser thing that the record shows."""

    name: str
    step: int | None = None
    parameter: str | None = None
    evidence: str | None = None


class Summary(_Answer):
    """A run in one line; null means not measured."""

    steps: int | None = None
    applied: int | None = None
    discarded: int | None = None
    overflows: int | None = None
    final_loss_scale: Number | None = None
    parameters_moved: int | None = None
    parameters_total: int | None = None
    muon_parameters_moved: int | None = None
    muon_parameters_total: int | None = None
    momentum_finite: bool | None = None
    max_weight_motion: Number | None = None
    """Largest 2-norm of (w - w0) over Muon-routed parameters."""
    last_loss: Number | None = None
    last_momentum_norm: Number | None = None


class Attempt(_Answer):
    """One execution of a run: one Ray job, or one recording of a script."""

    id: str
    ray_job: str | None = None
    """The job's submission id; None of a recorded script, which is no job."""
    number: int
    status: AttemptStatus
    failure: RunFailure | None = None
    phases: dict[str, float] = Field(default_factory=dict)
    """Unix seconds at which each phase ended."""
    ranks: list[dict[str, Any]] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    momentum_unit: MomentumUnit | None = None
    data_hash: str | None = None
    initial_parameters_hash: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    first_step: int | None = None
    declared_steps: int | None = None
    stored_steps: int | None = None


class Run(_Answer):
    """One run: its spec, where it stands, and what its record shows."""

    id: str
    name: str
    spec: dict[str, Any]
    fingerprint: str
    status: RunStatus
    stop_requested: bool = False
    waiting_reason: str | None = None
    queue_position: int | None = None
    failure: RunFailure | None = None
    verdict: RunVerdict | None = None
    findings: list[RunFinding] = Field(default_factory=list)
    attempts: list[Attempt] = Field(default_factory=list)
    summary: Summary = Summary()
    experiment_id: str | None = None
    tags: list[str] = Field(default_factory=list)
    priority: int = 0
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def is_finished(self) -> bool:
        return self.status.is_terminal

    def run_spec(self) -> RunSpec:
        """Parse the spec: fails only where a newer service knows fields that this version does not."""
        return RunSpec.model_validate(self.spec)


class Alert(_Answer):
    """A rule: which runs are watched, and where the message goes."""

    id: str
    name: str
    url: str
    """Without its path, which may hold a key."""
    when: dict[str, Any]
    tag: str | None = None
    who: str = ""
    created_at: datetime | None = None
    secret: str | None = None
    """Verifies the messages' signatures; only in the answer that made the alert."""


class Delivery(_Answer):
    """One message of an alert, and what became of it."""

    id: str
    """Sent as `webhook-id`, the same with every attempt."""
    run_id: str | None = None
    status: DeliveryStatus
    attempts: int
    next_try_at: datetime | None = None
    response_code: int | None = None
    response: str | None = None
    error: str | None = None
    body: str = ""
    created_at: datetime | None = None
    finished_at: datetime | None = None


class Step(_Answer):
    """One attempted optimizer step, exact; null means not measured, which is neither zero nor NaN."""

    step: int
    attempt: int | None = None
    overflow: bool
    discarded: bool
    loss_scale_before: Number | None = None
    loss_scale_after: Number | None = None
    loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    update_norm: Number | None = None
    momentum_norm: Number | None = None
    nonfinite_parameters: int | None = None
    ns_calls: int | None = None
    step_time_s: Number | None = None
    largest_parameter: int | None = None
    tokens: int | None = None


class ParameterStep(_Answer):
    """One parameter's momentum norm after a step."""

    step: int
    momentum_norm: Number | None = None


class Parameter(ParameterFact):
    """A parameter and the optimizer that takes it, with the reason."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PublishedCheck(_Answer):
    """Whether a run shows what is published of it, and in what it differs."""

    matches: bool
    differences: list[str] = Field(default_factory=list)


class Table(_Answer):
    """An experiment's result, one row a run; cells in the order of the columns."""

    columns: list[str] = Field(default_factory=list)
    rows: list[list[Any]] = Field(default_factory=list)
    run_ids: list[str] = Field(default_factory=list)
    published: list[PublishedCheck | None] = Field(default_factory=list)
    """By row; null where nothing is published of the run, or it has not ended."""
    check_label: str = "published"
    """What the checks hold the runs against: figures that are `published`, or what is `expected`."""
    checked: str = ""
    """What of a run they hold against them, in words; empty where that is each row's own."""


class Experiment(_Answer):
    """A question, and the runs that answer it."""

    id: str
    name: str
    builtin: str | None = None
    status: str | None = None
    created_at: datetime | None = None
    matrix: dict[str, list[Any]] = Field(default_factory=dict)
    runs: list[Run] = Field(default_factory=list)
    table: Table = Table()

    @property
    def is_finished(self) -> bool:
        return bool(self.runs) and all(run.is_finished for run in self.runs)


class FieldDifference(_Answer):
    """One dotted field in which two specs differ."""

    field: str
    a: Any = None
    b: Any = None


class Divergence(_Answer):
    """The first step at which two records part."""

    step: int
    scalar: str
    scalars: list[str] = Field(default_factory=list)
    a: Number | None = None
    b: Number | None = None
    parameter: str | None = None


class NotCompared(_Answer):
    """What two runs recorded under one name and is not the same quantity: what it is in each."""

    quantity: str
    a: str
    b: str


class Clipping(_Answer):
    """How often `gradient_clipping` acted."""

    limit: float
    scope: str
    """What is measured and scaled: `gradient`, `update` or `muon_exempt`."""
    applied: int
    acted: int | None = None
    """On how many of the applied steps; None where the norm that it goes by is not the recorded one."""


class Learned(_Answer):
    """One run's losses, summed up."""

    last: Number | None = None
    lowest: float | None = None
    lowest_step: int | None = None
    mean_of_last: Number | None = None
    """Over the last tenth of the applied steps."""
    mean_of_last_steps: int = 0


class Lower(_Answer):
    """The run, `a` or `b`, whose loss is the lower one on every step that both recorded, from one on."""

    side: str
    from_step: int
    until_step: int


class Learning(_Answer):
    """Which run learned better, by the losses."""

    a: Learned = Field(default_factory=Learned)
    b: Learned = Field(default_factory=Learned)
    lower: Lower | None = None
    caveat: str | None = None
    """Why the losses cannot simply be held against each other."""


class RouteDifference(_Answer):
    """A parameter that not the same optimizer takes in two runs."""

    parameter: str
    a: str
    """`muon`, `adamw` or `frozen`."""
    b: str


class Routes(_Answer):
    """Parameters that both models have and that not the same optimizer takes."""

    num_differing: int = 0
    differing: list[RouteDifference] = Field(default_factory=list)
    """The first hundred, in the model's order."""


class Comparison(_Answer):
    """Two runs: what differs in their specs, where their records part, and what that cost."""

    a: str
    b: str
    names: dict[str, str] = Field(default_factory=dict)
    """What the runs are called, under `a` and `b`."""
    spec_difference: list[FieldDifference] = Field(default_factory=list)
    is_pair: bool = False
    """Whether they differ in one field only."""
    shared: dict[str, bool | None] = Field(default_factory=dict)
    bit_equal_until: int | None = None
    """Every step before this one is bit-equal."""
    first_divergence: Divergence | None = None
    explanation: str = ""
    not_compared: list[NotCompared] = Field(default_factory=list)
    routes: Routes | None = None
    """None where a run has not told which optimizer takes its parameters."""
    clipping: dict[str, Clipping | None] = Field(default_factory=dict)
    """Under `a` and `b`; None for a run that never clips."""
    learning: Learning = Field(default_factory=Learning)
    discarded: dict[str, Any] = Field(default_factory=dict)
    loss_scale: dict[str, Any] = Field(default_factory=dict)
    final: dict[str, Any] = Field(default_factory=dict)
    cost: dict[str, Any] = Field(default_factory=dict)


class Series(_Answer):
    """Columns for a chart: exact where `exact`, else thinned; non-finite and overflow steps always exact."""

    series: dict[str, list[Number | None]] = Field(default_factory=dict)
    overflow_runs: list[list[int]] = Field(default_factory=list)
    discarded_runs: list[list[int]] = Field(default_factory=list)
    nonfinite_runs: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a list; `next_cursor` is None on the last."""

    items: list[Item]
    next_cursor: str | int | None = None


class HistoryEvent(_Answer):
    """One thing that happened to a run: a change of status, an alarm."""

    id: int
    run_id: str | None = None
    attempt: int | None = None
    at: datetime | None = None
    kind: str = ""
    from_status: str | None = None
    to_status: str | None = None
    who: str = ""
    why: str = ""
    detail: dict[str, Any] | None = None


class Event(_Answer):
    """One entry of a live stream: `run` with a run's JSON, or `event` with one of its history."""

    id: str | None = None
    event: str = "message"
    data: Any = None

    @property
    def ends_a_run(self) -> bool:
        """Whether it is a run's state after which nothing more happens of itself."""
        status = self.data.get("status") if self.event == "run" and isinstance(self.data, dict) else None
        return status in list(RunStatus) and RunStatus(status).is_terminal
