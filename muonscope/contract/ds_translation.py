"""DeepSpeed's own configuration into a spec's words, with a line on each of its keys: what became of it.

What a spec says itself is translated; what is DeepSpeed's alone stays `ds_config`; what neither has a place for is left
out, with the reason. `"auto"`, which integrations fill in, says nothing and is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from muonscope.contract.ds_config import AUTO, RELEASE, TRUE_WORDS, refusal
from muonscope.contract.run_spec import DS_CONFIG_OWNED_KEYS

# DeepSpeed clips where nothing is said.
DEFAULT_CLIPPING: Final = 1.0
_LOSS_SCALE: Final = {
    "initial_scale_power": "initial_power",
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "minimum",
}
_MUON: Final = ("lr", "momentum", "weight_decay", "ns_method")
_DECAYS: Final = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
_PLAIN: Final = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}


@dataclass(slots=True)
class Translation:
    """A spec's fields, and one line on each key in the order of the configuration."""

    spec: dict[str, Any] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)

    def becomes(self, key: str, place: str, value: Any) -> None:
        """Set a field, by its dotted name."""
        *parents, name = place.split(".")
        at = self.spec
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = value
        self.report.append(f"{key}: {place} = {value!r}")

    def left_out(self, key: str, why: str) -> None:
        self.report.append(f"{key}: left out, {why}")


def is_deepspeeds_own(config: Any) -> bool:
    """Whether a `ds_config` says what a spec has fields for, as DeepSpeed's own file does."""
    if not isinstance(config, Mapping):
        return False
    zero = config.get("zero_optimization")
    has_stage = isinstance(zero, bool) or (isinstance(zero, Mapping) and "stage" in zero)
    return has_stage or bool(DS_CONFIG_OWNED_KEYS.keys() & config.keys())


def contradiction(config: Mapping[str, Any], *, release: str = RELEASE) -> str | None:
    """Say what of a DeepSpeed configuration DeepSpeed itself would refuse or ignore; None where a spec can say it.

    The table of known keys is one release's: another `release` says itself what it takes.
    """
    given = {key: value for key, value in config.items() if value != AUTO}
    if release == RELEASE and (reason := refusal(given)) is not None:
        return reason
    if _is_enabled(given, "fp16") and (_is_enabled(given, "bf16") or _is_enabled(given, "bfloat16")):
        return "ds_config enables both fp16 and bf16, which DeepSpeed refuses; enable one"
    whole, micro, accumulated = (
        given.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    share = _share(given)
    if share and isinstance(whole, int) and whole % share:
        return (
            f"ds_config.train_batch_size={whole} is no multiple of train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={accumulated or 1}, whatever the number of ranks; correct one of them"
        )
    return None


def translate(config: Mapping[str, Any]) -> Translation:
    """Translate a DeepSpeed configuration; what is wrong in it is left for the service to refuse."""
    found = Translation()
    for key, value in config.items():
        if value == AUTO:
            found.left_out(key, '"auto" says nothing')
        elif key in _PLAIN:
            found.becomes(key, _PLAIN[key], value)
        elif key == "train_batch_size":
            _batch(config, found)
        elif key == "zero_optimization" and isinstance(value, bool):
            _zero(key, {"stage": int(value)}, found)
        elif key in _TRANSLATORS and isinstance(value, Mapping):
            _TRANSLATORS[key](key, {name: each for name, each in value.items() if each != AUTO}, found)
        else:
            found.becomes(key, f"ds_config.{key}", value)
    if config.get("gradient_clipping", AUTO) == AUTO:
        found.becomes("gradient_clipping (not said)", "gradient_clipping", DEFAULT_CLIPPING)
    found.spec.setdefault("precision", "fp32")
    return found


def _batch(config: Mapping[str, Any], found: Translation) -> None:
    whole, share = config["train_batch_size"], _share(config)
    if share and isinstance(whole, int) and whole > 0 and whole % share == 0:
        found.becomes("train_batch_size", "world_size", whole // share)
    else:
        found.left_out("train_batch_size", "it does not follow how many ranks share it; say world_size")


def _share(config: Mapping[str, Any]) -> int:
    """Return how many samples of a batch are a rank's; 0 where it is not said."""
    micro, accumulated = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    is_said = all(isinstance(part, int) and part > 0 for part in (micro, accumulated))
    return int(micro or 0) * int(accumulated) if is_said else 0


def _is_enabled(config: Mapping[str, Any], key: str) -> bool:
    section = config.get(key)
    value = section.get("enabled") if isinstance(section, Mapping) else None
    return value.strip().lower() in TRUE_WORDS if isinstance(value, str) else bool(value)


def _zero(key: str, zero: Mapping[str, Any], found: Translation) -> None:
    rest = {name: value for name, value in zero.items() if name != "stage"}
    stage = zero.get("stage")
    if isinstance(stage, str) and stage.strip().isdecimal():
        # As DeepSpeed reads it.
        stage = int(stage)
    if stage == 0:
        found.left_out(f"{key}.stage", f"a run has stage 1, 2 or 3, and not {stage!r}")
    elif "stage" in zero:
        found.becomes(f"{key}.stage", "zero_stage", stage)
    if rest:
        found.becomes(key, f"ds_config.{key}", rest)


def _fp16(key: str, fp16: Mapping[str, Any], found: Translation) -> None:
    if not _is_enabled({key: fp16}, key):
        found.left_out(key, "it is not enabled")
        return
    found.becomes(f"{key}.enabled", "precision", "fp16")
    for name, value in fp16.items():
        if name in _LOSS_SCALE:
            found.becomes(f"{key}.{name}", f"loss_scale.{_LOSS_SCALE[name]}", value)
        elif name == "loss_scale" and value:
            found.becomes(f"{key}.{name}", "loss_scale.static", value)
        elif name not in ("enabled", "loss_scale"):
            found.left_out(f"{key}.{name}", "a spec has no such field")


def _bf16(key: str, bf16: Mapping[str, Any], found: Translation) -> None:
    if not _is_enabled({key: bf16}, key):
        found.left_out(key, "it is not enabled")
        return
    found.becomes(f"{key}.enabled", "precision", "bf16")
    for name in bf16.keys() - {"enabled"}:
        found.left_out(f"{key}.{name}", "a spec has no such field")


def _optimizer(key: str, optimizer: Mapping[str, Any], found: Translation) -> None:
    kind, params = str(optimizer.get("type")), optimizer.get("params")
    given = {name: value for name, value in params.items() if value != AUTO} if isinstance(params, Mapping) else {}
    if kind.lower() != "muon":
        found.left_out(key, f"{kind} is not Muon, which every run here trains with")
        return
    for name, value in given.items():
        where = f"{key}.params.{name}"
        if name in _MUON:
            found.becomes(where, f"optimizer.{name}", value)
        elif name == "adam_lr":
            found.becomes(where, "optimizer.adam.lr", value)
        elif name == "eps":
            found.becomes(where, "optimizer.adam.eps", value)
        elif name == "betas" and isinstance(value, list) and len(value) == 2:
            found.becomes(f"{where}[0]", "optimizer.adam.beta1", value[0])
            found.becomes(f"{where}[1]", "optimizer.adam.beta2", value[1])
        else:
            found.left_out(where, "a spec has no such field")


def _scheduler(key: str, scheduler: Mapping[str, Any], found: Translation) -> None:
    kind, params = scheduler.get("type"), scheduler.get("params")
    given = params if isinstance(params, Mapping) else {}
    if kind not in _DECAYS or given.get("warmup_type", "log") != "linear" or given.get("warmup_min_lr", 0):
        found.left_out(
            key, f"only linear warmups from 0 of {' and '.join(_DECAYS)} have their like in optimizer.schedule"
        )
        return
    found.becomes(
        f"{key}.params.warmup_num_steps", "optimizer.schedule.warmup_steps", given.get("warmup_num_steps", 1000)
    )
    found.becomes(f"{key}.type", "optimizer.schedule.decay", _DECAYS[str(kind)])


_TRANSLATORS: Final = {
    "zero_optimization": _zero,
    "fp16": _fp16,
    "bf16": _bf16,
    "bfloat16": _bf16,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
}
