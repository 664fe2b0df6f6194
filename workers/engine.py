"""RunSpec into a model, a DeepSpeed engine and an optimizer: the one place where ours is translated into DeepSpeed's.

Order: seed → task (fp32, on the CPU) → optimizer → `deepspeed.initialize` → `attach` or `install` → snapshot.
"""

import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import muon_core
from muon_core.parameters import trainable_parameters
from muon_core.zero import deepspeed_native, released
from muon_core.zero.cpu import install_cpu_accelerator
from muonscope.contract.attempts import ParameterFact
from muonscope.contract.releases import DEFAULT_DEEPSPEED, RELEASES
from muonscope.contract.run_spec import RunSpec, UserTask
from muonscope.contract.status import Implementation, MomentumUnit, ParameterRoute, Precision
from workers.environment import recorded_environment
from workers.errors import ConfigRefused, TaskUnusable
from workers.faults import FaultPlan
from workers.final_state import InitialWeights, hash_tensors
from workers.schedule import Schedule
from workers.tasks import Task, TaskContext, build_task, own_errors

DTYPES: Final = {
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.FP32: torch.float32,
}
# Steps and micro-batches whose bytes make up the recorded data hash.
HASHED_STEPS: Final = 2
HASHED_MICRO_BATCHES: Final = 4
# How DeepSpeed, pydantic below it and muon_core say no.
_REFUSALS: Final = (
    AssertionError,
    KeyError,
    TypeError,
    ValueError,
    deepspeed.DeepSpeedConfigError,
    muon_core.errors.UnsupportedSetup,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands among the others."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Training:
    """Everything one rank needs to train, built and ready for its first step."""

    spec: RunSpec
    place: Place
    task: Task
    engine: Any
    parameters: list[nn.Parameter]
    """The trainable ones, by index."""
    routes: list[ParameterFact]
    faults: FaultPlan
    initial: InitialWeights
    probe_group: dist.ProcessGroup | None
    data_hash: str
    initial_parameters_hash: str

    @property
    def muon_indices(self) -> list[int]:
        return [route.index for route in self.routes if route.route is ParameterRoute.MUON]

    @property
    def momentum_unit(self) -> MomentumUnit:
        is_native = self.spec.implementation is Implementation.DEEPSPEED
        return MomentumUnit.LOSS_SCALED if is_native else MomentumUnit.UNSCALED


def join_process_group(store: Any, place: Place) -> None:
    """Form the world's process group over a store that all ranks share. Collective."""
    install_cpu_accelerator()
    backend = "nccl" if runs_on_gpu() else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)


def runs_on_gpu() -> bool:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name()) == "cuda"


def build_training(spec: RunSpec, place: Place) -> Training:
    """Build one rank's training state. Collective; the process group must be formed.

    Raises:
        ConfigRefused: DeepSpeed or muon_core will not run what the spec asks for; the message says why.
        TaskUnusable: the user's task cannot be imported or built.
    """
    _require_release(spec)
    torch.manual_seed(spec.seed)
    dtype = DTYPES[spec.precision]
    options = spec.task.options if isinstance(spec.task, UserTask) else {}
    context = TaskContext(
        seed=spec.seed,
        rank=place.rank,
        world_size=place.world_size,
        micro_batch_size=spec.micro_batch_size,
        dtype=dtype,
        options=options,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
    )
    task = build_task(spec, context)
    faults = FaultPlan(spec.faults, task.model, place.rank)
    before_cast = [parameter.detach() for _, parameter in trainable_parameters(task.model)]
    initial_hash = hash_tensors(tensor.to(dtype) for tensor in before_cast)
    engine, routes = _initialize(spec, task.model)
    parameters = [parameter for _, parameter in trainable_parameters(engine.module)]
    return Training(
        spec=spec,
        place=place,
        task=task,
        engine=engine,
        parameters=parameters,
        routes=routes,
        faults=faults,
        initial=InitialWeights(parameters, before_cast, place.rank, place.world_size),
        probe_group=dist.new_group() if place.world_size > 1 else None,
        data_hash=_hash_data(spec, task),
        initial_parameters_hash=initial_hash,
    )


def deepspeed_config(spec: RunSpec) -> dict[str, Any]:
    """Translate the spec's settings into DeepSpeed's, with the spec's raw `ds_config` merged in."""
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        # DeepSpeed's default is 1.0, not off.
        "gradient_clipping": spec.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        # Our optimizer keeps its state where offload_optimizer keeps the weights; DeepSpeed would insist on its own.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        # One reduction for all stages and implementations, so that a pair differs in what it declares only.
        "zero_optimization": {"stage": spec.zero_stage, "reduce_scatter": False},
    }
    if spec.precision is Precision.FP16:
        scale = spec.loss_scale
        ours["fp16"] = {
            "enabled": True,
            "loss_scale": scale.static or 0,
            "initial_scale_power": scale.initial_power,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
        }
    elif spec.precision is Precision.BF16:
        ours["bf16"] = {"enabled": True}
        # Otherwise stage 1 runs in BF16_Optimizer, whose partitions are laid out in a way of their own.
        ours["data_types"] = {"grad_accum_dtype": "bf16"}
    if spec.implementation is Implementation.DEEPSPEED:
        ours["optimizer"] = _native_optimizer(spec)
    return merged(ours, spec.ds_config)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid upon it, dictionaries merged key by key."""
    result = dict(base)
    for key, value in over.items():
        held = result.get(key)
        result[key] = merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return result


def describe_environment(training: Training) -> dict[str, Any]:
    """Return what of this rank's surroundings can change the numbers or explain them."""
    return describe_engine(training.engine, training.spec.precision)


def describe_engine(engine: Any, precision: Precision) -> dict[str, Any]:
    """Return the same of any engine."""
    on_gpu = runs_on_gpu()
    labels = []
    if not on_gpu and precision is Precision.FP16:
        labels.append("fp16 emulated on CPU")
    optimizer = getattr(engine.optimizer, "optimizer", None)
    iterated_in = None
    if isinstance(optimizer, muon_core.ZeroMuon):
        iterated_in = str(optimizer.iteration_dtype or optimizer.default_dtype).removeprefix("torch.")
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "cuda": torch.version.cuda if on_gpu else None,
        },
        "deepspeed_file": deepspeed.__file__,
        "python_executable": sys.executable,
        "host": socket.gethostname(),
        "device": device_name(engine.device),
        "backend": dist.get_backend(),
        "labels": labels,
        "environment_variables": recorded_environment(),
        "torch_threads": torch.get_num_threads(),
        "iteration_dtype": iterated_in,
    }


def device_name(device: torch.device | str) -> str:
    """Return the visible device's name, or the processor's."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with Path("/proc/cpuinfo").open() as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _initialize(spec: RunSpec, model: nn.Module) -> tuple[Any, list[ParameterFact]]:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigRefused("the task's model has no trainable parameter; there is nothing to optimize")
    try:
        if spec.implementation is Implementation.DEEPSPEED:
            return _initialize_native(spec, model)
        optimizer = _our_optimizer(spec, model)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=_schedule(spec), config=deepspeed_config(spec)
        )
        muon_core.attach(engine, optimizer)
    except _REFUSALS as error:
        raise ConfigRefused(f"DeepSpeed refuses this run: {type(error).__name__}: {error}") from error
    return engine, our_routes(optimizer.routed)


def _initialize_native(spec: RunSpec, model: nn.Module) -> tuple[Any, list[ParameterFact]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trainable, lr_scheduler=_schedule(spec), config=deepspeed_config(spec)
    )
    if spec.deepspeed is None:
        deepspeed_native.install(engine, str(spec.step_ordering))
    else:
        released.watch(engine)
    return engine, native_routes(engine)


def _our_optimizer(spec: RunSpec, model: nn.Module) -> muon_core.ZeroMuon:
    settings = spec.optimizer
    adam: dict[str, Any] = {
        "betas": (settings.adam.beta1, settings.adam.beta2),
        "eps": settings.adam.eps,
        "lr": settings.lr if settings.adam.lr is None else settings.adam.lr,
        "weight_decay": settings.weight_decay if settings.adam.weight_decay is None else settings.adam.weight_decay,
    }
    return muon_core.build_optimizer(
        model,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        ns_method=settings.ns_method,
        ns_steps=settings.ns_steps,
        adam=adam,
        step_ordering=str(spec.step_ordering),
        clip_scope=spec.clip_scope,
        schedule_counts_discarded_steps=settings.schedule is not None and settings.schedule.counts_discarded_steps,
    )


def _schedule(spec: RunSpec) -> Callable[[Any], Schedule] | None:
    """Return what DeepSpeed calls with its optimizer to get the run's schedule, or None without one."""
    settings = spec.optimizer.schedule
    return None if settings is None else lambda optimizer: Schedule(optimizer, settings, spec.steps)


def _native_optimizer(spec: RunSpec) -> dict[str, Any]:
    """Return DeepSpeed's own Muon block; a spec that asks for more than it can be told is refused at submission."""
    settings = spec.optimizer
    params: dict[str, Any] = {
        "lr": settings.lr,
        "momentum": settings.momentum,
        "weight_decay": settings.weight_decay,
        "betas": [settings.adam.beta1, settings.adam.beta2],
        "eps": settings.adam.eps,
        # Public switch: torch's AdamW instead of a CUDA extension compiled at first use.
        "torch_adam": True,
    }
    release = RELEASES[DEFAULT_DEEPSPEED if spec.deepspeed is None else spec.deepspeed.version]
    if len(release.ns_methods) > 1:
        # Those with one iteration do not know the key.
        params["ns_method"] = settings.ns_method
    if settings.adam.lr is not None:
        params["adam_lr"] = settings.adam.lr
    return {"type": "Muon", "params": params}


def our_routes(routed: Sequence[muon_core.Routed]) -> list[ParameterFact]:
    """Put our optimizer's routing into the contract's words."""
    return [
        ParameterFact(index=r.index, name=r.name, shape=r.shape, route=ParameterRoute(r.route), reason=r.reason)
        for r in sorted(routed, key=lambda entry: entry.index)
    ]


def native_routes(engine: Any) -> list[ParameterFact]:
    """Read DeepSpeed's own routing from the tags it left on the parameters."""
    named = list(engine.module.named_parameters())
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
    facts = []
    for index, (name, parameter) in enumerate(trainable + frozen):
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not parameter.requires_grad:
            route, reason = ParameterRoute.FROZEN, "requires no gradient"
        elif getattr(parameter, "use_muon", False):
            route, reason = ParameterRoute.MUON, "tagged use_muon by DeepSpeed"
        else:
            route, reason = ParameterRoute.ADAMW, "not tagged use_muon by DeepSpeed"
        facts.append(ParameterFact(index=index, name=name, shape=shape, route=route, reason=reason))
    return facts


def _require_release(spec: RunSpec) -> None:
    wanted = DEFAULT_DEEPSPEED if spec.deepspeed is None else spec.deepspeed.version
    loaded = str(deepspeed.__version__).split("+")[0]
    if wanted != loaded:
        raise ConfigRefused(
            f"the run asks for DeepSpeed {wanted}, and {loaded} is loaded from {deepspeed.__file__}; "
            "see what stands on that node's PYTHONPATH, or reinstall the DeepSpeed that came with Muonscope"
        )


def _hash_data(spec: RunSpec, task: Task) -> str:
    with own_errors(f"task {spec.task.name!r}: batch()"):
        try:
            return hash_tensors(
                tensor
                for step in range(min(HASHED_STEPS, spec.steps))
                for micro_batch in range(min(HASHED_MICRO_BATCHES, spec.gradient_accumulation_steps))
                for tensor in task.batch(step, micro_batch)
            )
        except (AttributeError, TypeError) as error:
            raise TaskUnusable(f"task {spec.task.name!r}: batch() must return a tuple of tensors: {error}") from error
