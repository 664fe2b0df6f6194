"""RunSpec: everything that says what to train, validated at construction and immutable after it.

The controller stores it, the job driver builds from it, and `fingerprint()` hashes what of it can change the numbers.
Field names are the public interface (JSON keys, form labels, compare output).
"""

import hashlib
import json
import math
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from muonscope.contract.refusals import SUPPORTED_ORDERINGS as SUPPORTED_ORDERINGS
from muonscope.contract.refusals import unsupported_reason as unsupported_reason
from muonscope.contract.releases import RELEASES, SUPPORTED_DEEPSPEED, Release
from muonscope.contract.status import Implementation, Precision, StepOrdering

MAX_STEPS: Final = 100_000_000
MAX_NAME_LENGTH: Final = 200
MAX_WORLD_SIZE: Final = 4096
EXTERNAL_TASK: Final = "external"
BUILT_IN_TASKS: Final = ("simple_model", "calm_boom", "matrix_pair", "byte_gpt")

# DeepSpeed keys that RunSpec already says: setting them twice would leave two truths.
DS_CONFIG_OWNED_KEYS: Final = {
    "train_batch_size": "micro_batch_size, gradient_accumulation_steps and world_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "fp16": "precision and loss_scale",
    "bf16": "precision",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
}

_SAFE_TEXT_FORBIDDEN = {"\x00"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def plain_text(value: str) -> str:
    """Refuse what no database or terminal can hold: NUL and lone surrogates."""
    if any(character in _SAFE_TEXT_FORBIDDEN for character in value):
        raise ValueError("must not contain a NUL character; remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode; it contains a lone surrogate") from None
    return value


def _refuse_other_than_number(value: Any) -> Any:
    """Refuse what would be read as a number: `zero_stage: true` is no stage 1, and "1" may be anything."""
    if isinstance(value, bool | str):
        raise ValueError(f"{value!r} is no integer; give an integer")
    return value


def refuse_bool(value: Any) -> Any:
    """Refuse a switch where a number is asked for."""
    # A text is read: YAML takes 1e-3 for one.
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is no number; give a number")
    return value


def _refuse_other_than_bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is no switch; give true or false")
    return value


Integer = Annotated[int, BeforeValidator(_refuse_other_than_number)]
Real = Annotated[float, BeforeValidator(refuse_bool)]
Switch = Annotated[bool, BeforeValidator(_refuse_other_than_bool)]
PlainText = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]


def _plain_tag(value: str) -> str:
    if not value.strip():
        raise ValueError("a tag must not be blank; give it a word")
    return plain_text(value)


PlainTag = Annotated[PlainText, AfterValidator(_plain_tag)]
"""A tag to put on a run that was accepted."""


class SimpleModelTask(_Part):
    """Biased square linears on one fixed batch: the 30-step table."""

    name: Literal["simple_model"] = "simple_model"
    hidden_size: Integer = Field(128, ge=1, le=8192)
    num_layers: Integer = Field(5, ge=1, le=256)
    fixed_batch: Switch = True
    """The same batch every step; false draws a fresh one per step."""


class CalmBoomTask(_Part):
    """Two bias-free matrices, of which one overflows at `overflow_step` while the other stays finite."""

    name: Literal["calm_boom"] = "calm_boom"
    width: Integer = Field(32, ge=2, le=8192)
    overflow_step: Integer | None = Field(1, ge=0)
    """Zero-based attempted step whose input overflows in `boom`; null for none."""


class MatrixPairTask(_Part):
    """Two bias-free square matrices; a step's samples stay the same however many micro-batches they are cut into."""

    name: Literal["matrix_pair"] = "matrix_pair"
    width: Integer = Field(64, ge=2, le=8192)


class ByteGptTask(_Part):
    """A small GPT on bytes of real text."""

    name: Literal["byte_gpt"] = "byte_gpt"
    text: str | None = Field(None, max_length=4096)
    """A file or folder readable on every worker; null reads the Python standard library's own source."""
    num_layers: Integer = Field(2, ge=1, le=96)
    hidden_size: Integer = Field(64, ge=8, le=16384)
    num_heads: Integer = Field(4, ge=1, le=256)
    context_length: Integer = Field(64, ge=2, le=65536)

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; choose a divisor"
            )
        return self


class UserTask(_Part):
    """`module:function`, shipped with the job and allow-listed by the service."""

    name: str = Field(max_length=MAX_NAME_LENGTH, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    options: dict[str, Any] = Field(default_factory=dict)


class ExternalTask(_Part):
    """A script of somebody's own, which `muonscope.record` watches; the service starts none."""

    name: Literal["external"] = EXTERNAL_TASK
    script: str | None = Field(None, max_length=4096)
    """The file that was started."""
    optimizer: str | None = Field(None, max_length=MAX_NAME_LENGTH)
    """The class of the optimizer under ZeRO."""
    is_open_ended: Switch = False
    """Nobody said how many steps there would be: the spec's `steps` is a bound, and the record says how many came."""


def _task_tag(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if name in (*BUILT_IN_TASKS, EXTERNAL_TASK):
        return str(name)
    return "user" if isinstance(name, str) and ":" in name else None


Task = Annotated[
    Annotated[SimpleModelTask, Tag("simple_model")]
    | Annotated[CalmBoomTask, Tag("calm_boom")]
    | Annotated[MatrixPairTask, Tag("matrix_pair")]
    | Annotated[ByteGptTask, Tag("byte_gpt")]
    | Annotated[ExternalTask, Tag(EXTERNAL_TASK)]
    | Annotated[UserTask, Tag("user")],
    Discriminator(
        _task_tag,
        custom_error_type="unknown_task",
        custom_error_message=(
            f"task.name must be one of {', '.join(BUILT_IN_TASKS)}, or an allow-listed module:function"
        ),
    ),
]


class LossScale(_Part):
    """The fp16 loss scaler. `static` replaces the dynamic one."""

    initial_power: Integer = Field(16, ge=0, le=32)
    """The initial dynamic scale is 2 to this power."""
    window: Integer = Field(1000, ge=1)
    """Steps without an overflow before the scale doubles."""
    hysteresis: Integer = Field(2, ge=1)
    """Overflows tolerated before the scale halves."""
    minimum: Integer = Field(1, ge=1)
    """An overflow at this scale ends the run."""
    static: Real | None = Field(None, gt=0)
    """A fixed scale; null scales dynamically."""


class AdamSettings(_Part):
    """AdamW, for the parameters that Muon does not take."""

    lr: Real | None = Field(None, ge=0)
    """Null takes the optimizer's `lr`."""
    beta1: Real = Field(0.9, ge=0, lt=1)
    beta2: Real = Field(0.999, ge=0, lt=1)
    eps: Real = Field(1e-8, gt=0)
    weight_decay: Real | None = Field(None, ge=0)
    """Null takes the optimizer's `weight_decay`."""


class LearningRateSchedule(_Part):
    """The learning rate over the run, as a share of the `lr` that each parameter group has."""

    warmup_steps: Integer = Field(0, ge=0)
    """The share rises evenly to 1 over so many steps; the first has 1 / warmup_steps of it."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What follows, down to `final_share` at the run's last step."""
    final_share: Real = Field(0.0, ge=0, le=1)
    counts_discarded_steps: Switch = False
    """A discarded step advances it as an applied one does; off, it waits, and the run ends before its last share."""


class OptimizerSettings(_Part):
    """Muon and its AdamW companion."""

    lr: Real = Field(0.02, ge=0)
    momentum: Real = Field(0.95, ge=0, lt=1)
    weight_decay: Real = Field(0.0, ge=0)
    nesterov: Switch = True
    ns_method: Literal["standard", "gram", "polar_express"] = "gram"
    ns_steps: Integer = Field(5, ge=1, le=32)
    adam: AdamSettings = AdamSettings()
    schedule: LearningRateSchedule | None = None
    """Null keeps the learning rate as it is."""


class Fault(_Part):
    """A planted non-finite gradient: the experiment's own, exact and repeatable overflow."""

    kind: Literal["inf", "nan"]
    step: Integer = Field(ge=0)
    rank: Integer = Field(0, ge=0)
    micro_batch: Integer = Field(0, ge=0)
    parameter: str | None = Field(None, max_length=1000)
    """The parameter's name; null plants it in the loss, and so in every gradient."""


class CheckpointPolicy(_Part):
    every_steps: Integer | None = Field(None, ge=1)
    """Null writes none."""
    keep: Integer = Field(2, ge=1, le=1000)


class Resources(_Part):
    gpus_per_rank: Real = Field(1.0, gt=0, le=1)
    """A half puts two ranks on one GPU."""
    memory_bytes: Integer | None = Field(None, ge=1)


class DeepSpeedRelease(_Part):
    version: str
    """An unmodified release to train under, from the allow-list."""

    @field_validator("version")
    @classmethod
    def _is_allowed(cls, value: str) -> str:
        if value not in SUPPORTED_DEEPSPEED:
            allowed = ", ".join(SUPPORTED_DEEPSPEED)
            raise ValueError(f"DeepSpeed {value} is not on the allow-list; choose one of {allowed}")
        return value


class RunSpec(_Part):
    """One immutable answer to part of an experiment's question."""

    name: PlainText = "run"
    task: Task = SimpleModelTask()
    step_ordering: StepOrdering = StepOrdering.ORDERED
    implementation: Implementation = Implementation.MUON_CORE
    zero_stage: Integer = Field(1, ge=1, le=3)
    world_size: Integer = Field(1, ge=1, le=MAX_WORLD_SIZE)
    precision: Precision = Precision.FP16
    loss_scale: LossScale = LossScale()
    optimizer: OptimizerSettings = OptimizerSettings()
    gradient_accumulation_steps: Integer = Field(1, ge=1, le=65536)
    micro_batch_size: Integer = Field(4, ge=1, le=1_048_576)
    """Samples per rank and micro-batch."""
    gradient_clipping: Real = Field(0.0, ge=0)
    """The largest allowed global gradient norm; 0 never clips."""
    clip_scope: Literal["gradient", "update", "muon_exempt"] = "gradient"
    steps: Integer = Field(30, ge=1, le=MAX_STEPS)
    """Attempted optimizer steps, discarded ones included."""
    stop_after_discarded_steps: Integer | None = Field(None, ge=1)
    """Ends the run after this many discarded steps in a row; null never does."""
    seed: Integer = Field(0, ge=0, lt=2**63)
    faults: tuple[Fault, ...] = Field((), max_length=10_000)
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    resources: Resources = Resources()
    deepspeed: DeepSpeedRelease | None = None
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed settings, merged under DeepSpeed's own validation."""
    working_dir: str | None = Field(None, pattern=r"^gcs://_ray_pkg_[0-9a-f]{16,64}\.zip$")
    """The package of code that a `module:function` task is in, as Ray names one that `ray job submit` has uploaded;
    `muonscope run` fills it in."""
    tags: tuple[PlainText, ...] = Field((), max_length=64)
    notes: str = Field("", max_length=20_000)
    priority: Integer = Field(0, ge=-1000, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _a_release_implies_what_it_does(cls, data: Any) -> Any:
        release = _release_in(data)
        return data if release is None else _as_released(release, data)

    @field_validator("name", "notes")
    @classmethod
    def _text_is_plain(cls, value: str) -> str:
        return plain_text(value)

    @field_validator("name")
    @classmethod
    def _has_a_name(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be blank; give the run a name")
        return value

    @field_validator("tags")
    @classmethod
    def _tags_are_plain(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(plain_text(tag) for tag in value)

    @field_validator("ds_config")
    @classmethod
    def _ds_config_leaves_our_fields_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, ours in DS_CONFIG_OWNED_KEYS.items():
            if key in value:
                raise ValueError(f"ds_config.{key} is set by the run's own {ours}; remove it from ds_config")
        zero = value.get("zero_optimization", {})
        if not isinstance(zero, dict):
            # Our own stage is merged into it, and DeepSpeed's old true and false would take its place.
            raise ValueError(f"ds_config.zero_optimization={zero!r} is not an object; give one, or leave it out")
        if "stage" in zero:
            raise ValueError("ds_config.zero_optimization.stage is set by zero_stage; remove it from ds_config")
        _refuse_unstorable(value, "ds_config", depth=0)
        return value

    @model_validator(mode="after")
    def _combination_is_supported(self) -> Self:
        # What has been seen to run needs nobody's leave.
        reason = None if isinstance(self.task, ExternalTask) else unsupported_reason(self)
        if reason:
            raise ValueError(reason)
        return self

    @property
    def planned_steps(self) -> int | None:
        """How many steps there are to be; None where only the record says."""
        return None if isinstance(self.task, ExternalTask) and self.task.is_open_ended else self.steps

    def fingerprint(self) -> str:
        """Hash all that can change the numbers: equal fingerprints mean the same experiment, to the last bit.

        Names, tags, notes, priority, checkpoints and resources are left out: they change none of them.
        """
        numbers = self.model_dump(mode="json", exclude=FIELDS_WITHOUT_NUMBERS)
        if numbers["optimizer"]["schedule"] is None:
            # Specs from before there were schedules keep their fingerprint.
            del numbers["optimizer"]["schedule"]
        if numbers["working_dir"] is None:
            # As above: the field is younger than fingerprints are.
            del numbers["working_dir"]
        canonical = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


FIELDS_WITHOUT_NUMBERS: Final = {"name", "tags", "notes", "priority", "checkpoint", "resources"}


def _release_in(data: Any) -> Release | None:
    """Return the release that a spec's raw data names, if it names one that is known."""
    named = data.get("deepspeed") if isinstance(data, dict) else None
    version = named.get("version") if isinstance(named, dict) else getattr(named, "version", None)
    return RELEASES.get(version) if isinstance(version, str) else None


def _as_released(release: Release, data: dict[str, Any]) -> dict[str, Any]:
    """Return a spec's raw data with what it leaves out decided by the release: it runs as it was released."""
    implied: dict[str, Any] = {"implementation": Implementation.DEEPSPEED}
    stage = data.get("zero_stage", RunSpec.model_fields["zero_stage"].default)
    if isinstance(stage, int) and stage in release.orderings:
        implied["step_ordering"] = release.orderings[stage]
    optimizer, method = data.get("optimizer", {}), release.ns_methods[0]
    if isinstance(optimizer, dict):
        optimizer = {"ns_method": method, **optimizer}
    elif isinstance(optimizer, OptimizerSettings) and "ns_method" not in optimizer.model_fields_set:
        optimizer = optimizer.model_copy(update={"ns_method": method})
    return {**implied, **data, "optimizer": optimizer}


def _refuse_unstorable(value: Any, path: str, depth: int) -> None:
    """Refuse nesting, numbers and text that no store or DeepSpeed could hold, naming the place."""
    if depth > 16:
        raise ValueError(f"{path} is nested more than 16 levels deep; flatten it")
    if isinstance(value, dict):
        for key, item in value.items():
            plain_text(str(key))
            _refuse_unstorable(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unstorable(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, str):
        plain_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}={value} is not finite; give a finite number")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{path}={value} does not fit in 64 bits; give a smaller number")
