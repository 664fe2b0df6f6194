"""What a worker group and the controller say to each other about one attempt, as JSON.

    POST /attempts/{id}/enrol       Enrolment         -> Enrolled        once; a second use is 409 and an alarm
    POST /attempts/{id}/facts       AttemptFacts      -> 204             before the first step, again as phases pass
    POST /attempts/{id}/steps       a telemetry batch -> StepsAccepted   idempotent; a superseded epoch is 409
    POST /attempts/{id}/heartbeat   Heartbeat         -> HeartbeatReply  every `heartbeat_s`
    POST /attempts/{id}/checkpoints CheckpointReport  -> 204             when one is complete or was removed
    POST /attempts/{id}/logs        LogPiece          -> LogAccepted     as ranks and driver print
    POST /attempts/{id}/load        LoadReport        -> 204             from each rank, a sample every 5 s
    POST /attempts/{id}/outcome     AttemptOutcome    -> 204             once, after the last step was accepted

All but `enrol` carry `Authorization: Bearer <attempt token>`.
"""

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from muonscope.contract.run_spec import Integer, Real, RunSpec, refuse_bool
from muonscope.contract.status import AttemptStatus, FailureKind, MomentumUnit, ParameterRoute, Phase
from muonscope.contract.telemetry import decode_number, encode_number

# The longest piece of a log in one message, in characters.
MAX_LOG_PIECE: Final = 65536
# So few weights travel and are kept as they are: the built-in experiments' small cases, 64 KiB.
MAX_KEPT_WEIGHTS: Final = 16384

# A float that survives JSON: NaN and the infinities travel as strings.
Number = Annotated[
    float,
    BeforeValidator(decode_number),
    BeforeValidator(refuse_bool),
    PlainSerializer(encode_number, when_used="json"),
]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Enrolment(_Message):
    """The one-use token from the job's command line, exchanged for the attempt's own."""

    token: str = Field(max_length=200)
    ray_job_id: str | None = Field(None, max_length=200)


class CheckpointFact(_Message):
    """A checkpoint that is complete: fsynced, hashed and under its final name."""

    step: Integer = Field(ge=1, lt=2**63)
    """The first step to attempt after loading it."""
    total_bytes: Integer = Field(ge=0, lt=2**63)
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class CheckpointReport(_Message):
    """Every complete checkpoint of the run that is there now; those not named are gone."""

    checkpoints: tuple[CheckpointFact, ...] = Field(max_length=10_000)


class LoadSample(_Message):
    """What one rank's process, its node and its GPU were busy with at one moment; null: could not be measured."""

    rank: Integer = Field(ge=0, lt=2**31)
    at: Real = Field(ge=0, lt=2**33)
    """Unix seconds, on the rank's clock."""
    cpu_percent: Real | None = Field(None, ge=0, allow_inf_nan=False)
    """Of one core, the process's own threads together, since the sample before."""
    memory_bytes: Integer | None = Field(None, ge=0, lt=2**63)
    """The process's resident memory."""
    node_cpu_percent: Real | None = Field(None, ge=0, allow_inf_nan=False)
    node_memory_bytes: Integer | None = Field(None, ge=0, lt=2**63)
    node_memory_total_bytes: Integer | None = Field(None, ge=0, lt=2**63)
    gpu_percent: Real | None = Field(None, ge=0, allow_inf_nan=False)
    gpu_memory_bytes: Integer | None = Field(None, ge=0, lt=2**63)
    """In use on the device, by whomever."""
    gpu_memory_total_bytes: Integer | None = Field(None, ge=0, lt=2**63)


class LoadReport(_Message):
    """Samples of one rank or several. One that was sent before, of the same rank and moment, is kept as it was."""

    samples: tuple[LoadSample, ...] = Field(max_length=1000)


class LogPiece(_Message):
    """What one rank, or the driver, has printed since the last piece."""

    rank: Integer | None = Field(ge=0, lt=2**31)
    """Null is the driver."""
    start: Integer = Field(ge=0, lt=2**63)
    """The piece's first byte in all that was printed."""
    stop: Integer = Field(ge=0, lt=2**63)
    text: str = Field(max_length=MAX_LOG_PIECE)


class LogAccepted(_Message):
    stop: Integer
    """The byte after the newest stored one: where the next piece begins."""


class Enrolled(_Message):
    spec: RunSpec
    run_id: str
    attempt: Integer
    """1 for a run's first attempt."""
    epoch: Integer
    token: str
    heartbeat_s: Real
    stall_limit_s: Real
    """A rank without a new step for this long ends the attempt as stalled."""
    resume_step: Integer = 0
    """The first step to attempt; above 0 the newest whole one of `checkpoints` at or before it is loaded."""
    checkpoints: tuple[CheckpointFact, ...] = ()
    """Those that attempts of this run have reported: no other folder is loaded, whatever it says of itself."""


class ParameterFact(_Message):
    index: Integer
    name: str
    shape: tuple[Integer, ...]
    route: ParameterRoute
    reason: str


class RankFact(_Message):
    """Where one rank runs, as the rank itself sees it."""

    rank: Integer
    node: str
    pid: Integer
    device: str
    """The visible device's name, or the processor's."""
    device_id: str | None = None
    """The physical GPU as Ray assigned it."""
    local_rank: Integer = 0


class AttemptFacts(_Message):
    """What an attempt is made of; a later message replaces the fields it sets."""

    phases: dict[Phase, Real] = Field(default_factory=dict)
    """Unix seconds on the worker's clock at which each phase ended."""
    parameters: list[ParameterFact] | None = None
    ranks: list[RankFact] | None = None
    momentum_unit: MomentumUnit | None = None
    data_hash: str | None = None
    """Hash of the first batches' bytes: equal hashes prove equal data."""
    initial_parameters_hash: str | None = None
    """Hash of all parameters after initialisation: equal hashes prove equal seeds."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Versions, loaded files, labels such as `fp16 emulated on CPU`, variables that change the code path."""
    resolved_ds_config: dict[str, Any] | None = None


class StepsAccepted(_Message):
    stored: Integer
    """Records of this batch that are now stored, repeats included."""
    next_step: Integer
    """The step after the newest stored one."""


class Heartbeat(_Message):
    status: AttemptStatus
    steps_recorded: Integer = 0
    silent_ranks: list[int] = Field(default_factory=list)


class HeartbeatReply(_Message):
    stop_requested: bool = False


class Failure(_Message):
    kind: FailureKind
    rank: Integer | None = None
    step: Integer | None = None
    message: str = Field("", max_length=20_000)


class FinalState(_Message):
    """Measured once at the end, against a snapshot taken after initialisation in the same dtype."""

    parameters_moved: Integer | None = None
    parameters_total: Integer | None = None
    muon_parameters_moved: Integer | None = None
    muon_parameters_total: Integer | None = None
    parameters_changed_before_cast: Integer | None = None
    """The misleading count: against the model before DeepSpeed cast it, where casting alone moves everything."""
    max_weight_motion: Number | None = None
    """Largest 2-norm of (w - w0) over Muon-routed parameters."""
    nonfinite_parameters: Integer | None = None
    parameter_motions: list[Number] | None = None
    """2-norm of (w - w0) for every trainable parameter, by index."""
    final_parameters_hash: str | None = None
    weights: str | None = Field(None, max_length=MAX_KEPT_WEIGHTS * 6)
    """Of models with at most MAX_KEPT_WEIGHTS elements, all weights by parameter index: float32, little-endian, base64.
    They say how far apart two runs end."""
    peak_memory_bytes: Integer | None = None


class AttemptOutcome(_Message):
    status: AttemptStatus
    first_step: Integer = 0
    declared_steps: Integer
    """Steps recorded by this attempt: the run succeeds only when as many are stored."""
    failure: Failure | None = None
    final: FinalState | None = None
