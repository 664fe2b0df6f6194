"""Which settings of a run do not go together, and why: said at submission, so that nothing is run as something else.

One rule a function, in the order in which a person would look for what is wrong; the first that speaks is the answer.
What only a built model can show (expert layers, a tag on a parameter) is left to the worker.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from muonscope.contract import ds_config
from muonscope.contract.releases import RELEASES
from muonscope.contract.status import Implementation, Precision, StepOrdering

if TYPE_CHECKING:
    from muonscope.contract.run_spec import RunSpec

# What each implementation can run today: (implementation, stage) -> orderings. The one table that submission,
# the submit form and the docs read; a workers test asserts that each listed pair really trains.
SUPPORTED_ORDERINGS: Final[dict[tuple[Implementation, int], frozenset[StepOrdering]]] = {
    (Implementation.MUON_CORE, 1): frozenset(StepOrdering),
    (Implementation.MUON_CORE, 2): frozenset(StepOrdering),
    (Implementation.MUON_CORE, 3): frozenset(StepOrdering),
    (Implementation.DEEPSPEED, 1): frozenset(StepOrdering) - {StepOrdering.ORDERED},
    (Implementation.DEEPSPEED, 2): frozenset(StepOrdering) - {StepOrdering.ORDERED},
    (Implementation.DEEPSPEED, 3): frozenset({StepOrdering.DEFERRED}),
}

# What DeepSpeed's Muon computes and cannot be told otherwise.
_NATIVE_NS_STEPS: Final = 5
_NATIVE_NS_METHODS: Final = ("gram", "standard")


def unsupported_reason(spec: "RunSpec") -> str | None:
    """Say why this combination cannot run as asked, or None. Nothing is ever run as something else."""
    return next((reason for rule in _RULES if (reason := rule(spec)) is not None), None)


def _release(spec: "RunSpec") -> str | None:
    """A release runs as it was released, and nothing else under its name."""
    if spec.deepspeed is None:
        return None
    release = RELEASES[spec.deepspeed.version]
    name = f"DeepSpeed {release.version}"
    if spec.implementation is not Implementation.DEEPSPEED:
        return (
            f"implementation={spec.implementation} is not what {name} runs by itself; set implementation to deepspeed, "
            "or leave deepspeed out"
        )
    ordering = release.orderings.get(spec.zero_stage)
    if ordering is None:
        stages = " or ".join(map(str, release.orderings))
        return f"zero_stage={spec.zero_stage} is not available under {name}: its Muon has stages {stages}"
    if spec.step_ordering is not ordering:
        return (
            f"step_ordering={spec.step_ordering} is not what {name} does at zero_stage={spec.zero_stage}: a release "
            f"runs as it is; leave step_ordering out, or set it to {ordering}"
        )
    settings = spec.optimizer
    if settings.ns_method not in release.ns_methods:
        return (
            f"optimizer.ns_method={settings.ns_method} is not one of {name}'s: {', '.join(release.ns_methods)}; "
            "leave it out to take its default"
        )
    if settings.adam.lr is not None and not release.has_adam_lr:
        return f"optimizer.adam.lr={settings.adam.lr} is unknown to {name}: its AdamW takes Muon's lr; leave it out"
    return None


def _ordering(spec: "RunSpec") -> str | None:
    offered = SUPPORTED_ORDERINGS[spec.implementation, spec.zero_stage]
    if spec.deepspeed is not None or spec.step_ordering in offered:
        return None
    return (
        f"step_ordering={spec.step_ordering} is not available with implementation={spec.implementation} "
        f"at zero_stage={spec.zero_stage}; choose one of: {', '.join(sorted(offered))}"
    )


def _static_scale(spec: "RunSpec") -> str | None:
    if spec.loss_scale.static is None or spec.precision is Precision.FP16:
        return None
    return f"loss_scale.static={spec.loss_scale.static} needs precision=fp16; the run has {spec.precision}"


def _native_settings(spec: "RunSpec") -> str | None:
    """DeepSpeed's Muon has fixed what ours leaves open."""
    if spec.implementation is not Implementation.DEEPSPEED:
        return None
    settings = spec.optimizer
    fixed = {
        "nesterov": (settings.nesterov, True),
        "ns_steps": (settings.ns_steps, _NATIVE_NS_STEPS),
        "adam.weight_decay": (settings.adam.weight_decay, None),
    }
    for name, (asked, offered) in fixed.items():
        if asked != offered:
            return (
                f"optimizer.{name}={asked} is not what implementation=deepspeed computes (it has {offered}); "
                "leave it out or choose implementation=muon_core"
            )
    if settings.ns_method not in _NATIVE_NS_METHODS:
        return (
            f"optimizer.ns_method={settings.ns_method} is not one of DeepSpeed's; choose one of "
            f"{', '.join(_NATIVE_NS_METHODS)}, or implementation=muon_core"
        )
    return None


def _clip_scope(spec: "RunSpec") -> str | None:
    is_native = spec.implementation is Implementation.DEEPSPEED
    asks = "clip_scope" in spec.model_fields_set and spec.gradient_clipping > 0
    if not is_native or not asks or spec.clip_scope == "update":
        return None
    return (
        f"clip_scope={spec.clip_scope} is not what implementation=deepspeed does: it clips Muon's update "
        "by the update's own norm; set clip_scope to update"
    )


def _schedule(spec: "RunSpec") -> str | None:
    schedule = spec.optimizer.schedule
    if schedule is None:
        return None
    if schedule.warmup_steps >= spec.steps:
        return (
            f"optimizer.schedule.warmup_steps={schedule.warmup_steps} leaves nothing of steps={spec.steps}; "
            "warm up for fewer steps"
        )
    if schedule.counts_discarded_steps and spec.implementation is Implementation.DEEPSPEED:
        return (
            "optimizer.schedule.counts_discarded_steps=True is not what implementation=deepspeed does: its engine "
            "leaves a schedule where it is when a step is discarded; set it to false, or choose "
            "implementation=muon_core"
        )
    return None


def _ds_config(spec: "RunSpec") -> str | None:
    """The table of known keys is one release's; another one says itself what it takes."""
    is_other = spec.deepspeed is not None and spec.deepspeed.version != ds_config.RELEASE
    return None if is_other else ds_config.refusal(spec.ds_config)


def _offload(spec: "RunSpec") -> str | None:
    zero = _part(spec.ds_config, "zero_optimization")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        # DeepSpeed makes the one of the other; a release takes its own names.
        if spec.deepspeed is None and str(zero.get(old)).strip().lower() in ds_config.TRUE_WORDS:
            return f"ds_config.zero_optimization.{old}={zero[old]!r} is an old name; set {new} instead"
    optimizer, parameters = (_device(zero, f"offload_{what}") for what in ("optimizer", "param"))
    if parameters != "none":
        return f"ds_config.zero_optimization.offload_param.device={parameters} is not supported; remove offload_param"
    if optimizer == "none":
        return None
    name = f"ds_config.zero_optimization.offload_optimizer.device={optimizer}"
    if spec.implementation is Implementation.DEEPSPEED:
        return None if spec.deepspeed is not None else (
            f"{name} is not available with implementation=deepspeed: there its Muon runs where no ordering reaches it; "
            "remove offload_optimizer, or choose implementation=muon_core"
        )  # fmt: skip
    if optimizer != "cpu":
        return f"{name} is not available with implementation=muon_core; choose cpu"
    if spec.step_ordering is not StepOrdering.ORDERED:
        return (
            f"step_ordering={spec.step_ordering} is not available with offload_optimizer: it acts before the "
            "overflow check, where offload has already recorded its verdict; choose ordered"
        )
    if spec.ds_config.get("zero_force_ds_cpu_optimizer"):
        return "ds_config.zero_force_ds_cpu_optimizer=True asks for DeepSpeed's own Adam; remove it"
    return None


def _deepspeed_settings(spec: "RunSpec") -> str | None:
    """What moves a partition or the loss to where neither implementation here looks for it."""
    config = spec.ds_config
    zero, tensor_parallel = _part(config, "zero_optimization"), _part(config, "tensor_parallel")
    autocast = _part(config, "torch_autocast")
    if zero.get("zenflow"):
        return "ds_config.zero_optimization.zenflow steps parts of a partition at other times than the rest; remove it"
    if _number(tensor_parallel.get("autotp_size")) > 1:
        return (
            f"ds_config.tensor_parallel.autotp_size={tensor_parallel['autotp_size']} splits matrices beyond ZeRO's "
            "partitions; train with data parallelism alone"
        )
    if autocast.get("enabled") and str(autocast.get("dtype", "")).removeprefix("torch.") in ("float16", "fp16", "half"):
        return (
            f"ds_config.torch_autocast.dtype={autocast['dtype']} scales the loss outside the run's loss_scale; "
            "set precision to fp16 instead"
        )
    if _part(config, "amp").get("enabled"):
        return "ds_config.amp.enabled=True is not ZeRO's mixed precision; set precision instead"
    if config.get("zero_allow_untested_optimizer") is False:
        return "ds_config.zero_allow_untested_optimizer=False makes DeepSpeed refuse Muon; remove it"
    return None


def _deepspeed_combinations(spec: "RunSpec") -> str | None:
    """DeepSpeed settings that one stage, precision or ordering alone cannot have."""
    config, is_native = spec.ds_config, spec.implementation is Implementation.DEEPSPEED
    accumulation = _part(config, "data_types").get("grad_accum_dtype")
    if spec.precision is Precision.BF16 and spec.zero_stage == 1 and accumulation in ("fp32", "float32", "float"):
        return (
            f"ds_config.data_types.grad_accum_dtype={accumulation} with precision=bf16 at zero_stage=1 runs in "
            "DeepSpeed's BF16_Optimizer, whose partitions are laid out otherwise; use stage 2 or 3, or bf16"
        )
    if is_native and spec.zero_stage == 3 and _part(config, "zero_optimization").get("reduce_scatter"):
        return (
            "ds_config.zero_optimization.reduce_scatter=True is refused by DeepSpeed's own Muon at zero_stage=3; "
            "remove it, or choose implementation=muon_core"
        )
    is_ordered = spec.step_ordering is StepOrdering.ORDERED
    if config.get("managed_gradient_accumulation") is False and not is_ordered and spec.deepspeed is None:
        return (
            f"step_ordering={spec.step_ordering} must know a window's last micro-batch before it is reduced; leave "
            "ds_config.managed_gradient_accumulation on"
        )
    return None


def _faults(spec: "RunSpec") -> str | None:
    for index, fault in enumerate(spec.faults):
        if fault.rank >= spec.world_size:
            return (
                f"faults[{index}].rank={fault.rank} does not exist at world_size={spec.world_size}; "
                f"use {_below(spec.world_size)}"
            )
        if fault.step >= spec.steps:
            return (
                f"faults[{index}].step={fault.step} is never reached: steps={spec.steps} begin at 0; "
                f"use {_below(spec.steps)}"
            )
        if fault.micro_batch >= spec.gradient_accumulation_steps:
            return (
                f"faults[{index}].micro_batch={fault.micro_batch} does not exist at "
                f"gradient_accumulation_steps={spec.gradient_accumulation_steps}; "
                f"use {_below(spec.gradient_accumulation_steps)}"
            )
    return None


def _below(count: int) -> str:
    return f"0 to {count - 1}" if count > 1 else "0"


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _device(zero: Mapping[str, Any], key: str) -> str:
    """Return the device that DeepSpeed is asked to keep something on; `none` when it is not."""
    return str(_part(zero, key).get("device", "none"))


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


_RULES: Final[tuple[Callable[["RunSpec"], str | None], ...]] = (
    _release,
    _ordering,
    _static_scale,
    _native_settings,
    _clip_scope,
    _schedule,
    _ds_config,
    _offload,
    _deepspeed_settings,
    _deepspeed_combinations,
    _faults,
)
