"""DeepSpeed's own configuration into a spec's words, with a line on each of its keys: what became of it.

What a spec says itself is translated; what is DeepSpeed's alone stays `ds_config`; what neither has a place for is left
out, with the reason. `"auto"`, which integrations fill in, says nothing and is left out. Batch sizes are reckoned with
what the spec says of them itself, for it goes before the file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
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


def contradiction(
    config: Mapping[str, Any], said: Mapping[str, Any] = MappingProxyType({}), *, release: str = RELEASE
) -> str | None:
    """Say what of a DeepSpeed configuration DeepSpeed itself would refuse or ignore; None where a spec can say it.

    Args:
        config: DeepSpeed's own.
        said: what the spec says itself.
        release: another release than the one whose keys are known says itself what it takes.
    """
    given = {key: value for key, value in config.items() if value != AUTO}
    if release == RELEASE and (reason := refusal(given)) is not None:
        return reason
    if _is_enabled(given, "fp16") and (_is_enabled(given, "bf16") or _is_enabled(given, "bfloat16")):
        return "ds_config enables both fp16 and bf16, which DeepSpeed refuses; enable one"
    clipping = given.get("gradient_clipping")
    if isinstance(clipping, str):
        return f"ds_config.gradient_clipping={clipping!r} is a text, at which DeepSpeed fails; give a number"
    return _batch_contradiction(given, said)


def translate(config: Mapping[str, Any], said: Mapping[str, Any] = MappingProxyType({})) -> Translation:
    """Translate a DeepSpeed configuration; what is wrong in it is left for the service to refuse.

    Args:
        config: DeepSpeed's own.
        said: what the spec says itself; a batch's size is shared out by it.
    """
    found = Translation()
    for key, value in config.items():
        if value == AUTO:
            found.left_out(key, '"auto" says nothing')
        elif key in _PLAIN:
            found.becomes(key, _PLAIN[key], value)
        elif key == "train_batch_size":
            _batch(key, config, said, found)
        elif key == "zero_optimization" and isinstance(value, bool):
            _zero(key, {"stage": int(value)}, found)
        elif key in _TRANSLATORS and isinstance(value, Mapping):
            _TRANSLATORS[key](key, _said(key, value, found), found)
        else:
            found.becomes(key, f"ds_config.{key}", value)
    if config.get("gradient_clipping", AUTO) == AUTO:
        found.becomes("gradient_clipping (not said)", "gradient_clipping", DEFAULT_CLIPPING)
    if "precision" not in found.spec:
        found.becomes("fp16 and bf16 (not said)", "precision", "fp32")
    return found


def _said(key: str, section: Mapping[str, Any], found: Translation) -> dict[str, Any]:
    """A section without what it leaves to others; each of those has its line as well."""
    for name, value in section.items():
        if value == AUTO:
            found.left_out(f"{key}.{name}", '"auto" says nothing')
    return {name: value for name, value in section.items() if value != AUTO}


def _batch_sizes(config: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, int | None]:
    """What is known of the three factors of DeepSpeed's `train_batch_size`, by the spec's names."""
    places = {place: key for key, place in _PLAIN.items()}
    given = {
        name: said[name] if name in said else config.get(places.get(name, ""))
        for name in ("micro_batch_size", "gradient_accumulation_steps", "world_size")
    }
    return {name: value if type(value) is int and value > 0 else None for name, value in given.items()}


def _batch_contradiction(config: Mapping[str, Any], said: Mapping[str, Any]) -> str | None:
    whole = config.get("train_batch_size")
    if type(whole) is not int:
        return None
    sizes = _batch_sizes(config, said)
    known = {name: size for name, size in sizes.items() if size is not None}
    share = math.prod(known.values())
    is_open = len(known) < len(sizes)
    if whole == share or (is_open and whole > 0 and whole % share == 0):
        return None
    factors = " times ".join(f"{name}={size}" for name, size in known.items())
    relation, rest = ("no multiple of", ", whatever the rest is") if is_open else ("not", "")
    return f"ds_config.train_batch_size={whole} is {relation} {factors}{rest}; correct one of them"


def _batch(key: str, config: Mapping[str, Any], said: Mapping[str, Any], found: Translation) -> None:
    """Find the factor that is not said, as DeepSpeed does; accumulation is 1 where two are not."""
    whole, sizes = config[key], _batch_sizes(config, said)
    missing = [name for name, size in sizes.items() if size is None]
    if len(missing) > 1 and "gradient_accumulation_steps" in missing:
        missing.remove("gradient_accumulation_steps")
    share = math.prod(size for size in sizes.values() if size is not None)
    if len(missing) > 1 or type(whole) is not int or whole < 1 or whole % share:
        found.left_out(key, "it does not follow how many ranks share it; say world_size")
    elif missing:
        found.becomes(key, missing[0], whole // share)
    else:
        found.left_out(key, f"it is {' times '.join(sizes)}")


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
        found.left_out(key, "it is not enabled" if "enabled" in fp16 else "it does not say whether it is enabled")
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
    if kind.lower() != "muon":
        found.left_out(key, f"{kind} is not Muon, which every run here trains with")
        return
    found.report.append(f"{key}.type: Muon; implementation says whose, step_ordering in which order")
    given = _said(f"{key}.params", params, found) if isinstance(params, Mapping) else {}
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
