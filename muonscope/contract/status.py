"""The words of the system, one enum each; the rules about them live where they act.

Every value here is at once a column value, a JSON value, a log field and a dashboard label.
"""

from enum import StrEnum


class RunStatus(StrEnum):
    """Where a run stands. Ray Jobs' words, lower case, with `queued` before them."""

    QUEUED = "queued"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        return self in (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.STOPPED)


class AttemptStatus(StrEnum):
    """Where one execution of a run stands; `lost` means its job vanished without an outcome."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def is_terminal(self) -> bool:
        return self not in (AttemptStatus.PENDING, AttemptStatus.RUNNING)


class FailureKind(StrEnum):
    """Why an attempt or a run failed. Verdict-bearing deaths are never retried."""

    LOSS_SCALE_EXHAUSTED = "loss_scale_exhausted"
    NO_PROGRESS = "no_progress"
    TASK_ERROR = "task_error"
    CONFIG_REFUSED = "config_refused"
    WORKER_DIED = "worker_died"
    WORKER_STALLED = "worker_stalled"
    OUT_OF_MEMORY = "out_of_memory"
    JOB_LOST = "job_lost"
    SETUP_FAILED = "setup_failed"
    RECORD_INCOMPLETE = "record_incomplete"
    DISK_FULL = "disk_full"
    CHECKPOINT_UNUSABLE = "checkpoint_unusable"

    @property
    def is_infrastructure(self) -> bool:
        """Whether another attempt may succeed where this one did not."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        FailureKind.WORKER_DIED,
        FailureKind.WORKER_STALLED,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.JOB_LOST,
        FailureKind.SETUP_FAILED,
        FailureKind.RECORD_INCOMPLETE,
    }
)


class Verdict(StrEnum):
    """What a run's record proves, gravest first: the order of members is the order of gravity."""

    DIES = "dies"
    POISONED = "poisoned"
    DIVERGED = "diverged"
    STALLED = "stalled"
    ABSORBED = "absorbed"
    INCONCLUSIVE = "inconclusive"
    TRAINS = "trains"


class Finding(StrEnum):
    """Lesser things a record shows, beside its verdicts."""

    LOSS_ROSE = "loss_rose"
    NO_MUON = "no_muon"


class StepOrdering(StrEnum):
    """When the momentum moves, relative to the overflow check."""

    MASTER = "master"
    PER_TENSOR = "per_tensor"
    INVERTED = "inverted"
    PRECHECK = "precheck"
    DEFERRED = "deferred"
    ORDERED = "ordered"


class Implementation(StrEnum):
    """Whose arithmetic runs: ours, or DeepSpeed's own Muon path."""

    MUON_CORE = "muon_core"
    DEEPSPEED = "deepspeed"


class MomentumUnit(StrEnum):
    """The unit the recorded momentum norms are in."""

    UNSCALED = "unscaled"
    LOSS_SCALED = "loss_scaled"


class Precision(StrEnum):
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class ParameterRoute(StrEnum):
    MUON = "muon"
    ADAMW = "adamw"
    FROZEN = "frozen"


class QueueMode(StrEnum):
    """Whether queued runs start. `paused` takes submissions, `draining` does not; live runs go on in both."""

    OPEN = "open"
    PAUSED = "paused"
    DRAINING = "draining"


class LimitKind(StrEnum):
    """What a limit on GPUs held at once is set for."""

    USER = "user"
    TAG = "tag"


class AlertKind(StrEnum):
    """What an alert watches for in runs."""

    VERDICT = "verdict"
    STATUS = "status"
    DISCARDED_SHARE = "discarded_share"
    SILENCE = "silence"


class DeliveryStatus(StrEnum):
    """Where the message of an alert stands: still to be sent, taken by its receiver, or given up."""

    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


class TokenScope(StrEnum):
    """What a user's token allows; each scope includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def includes(self, needed: "TokenScope") -> bool:
        scopes = list(TokenScope)
        return scopes.index(self) >= scopes.index(needed)


class Phase(StrEnum):
    """The stations between a submitted run and its first step, in order; each has a time in the attempt's record."""

    SUBMITTED = "submitted"
    JOB_SUBMITTED = "job_submitted"
    DRIVER_STARTED = "driver_started"
    ENROLLED = "enrolled"
    WORKERS_STARTED = "workers_started"
    IMPORTED = "imported"
    INITIALIZED = "initialized"
    FIRST_STEP = "first_step"
    LAST_STEP = "last_step"
    FINISHED = "finished"
