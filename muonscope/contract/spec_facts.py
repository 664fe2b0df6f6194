"""What a stored spec says between its lines; of its JSON, for whoever reads runs and builds no RunSpec."""

from collections.abc import Mapping
from typing import Any

from muonscope.contract.run_spec import EXTERNAL_TASK
from muonscope.contract.status import Implementation, Precision


def recorded_optimizer(spec: Mapping[str, Any]) -> str | None:
    """Return the class of a recorded script's optimizer; None of a run that the service started."""
    task = spec.get("task") or {}
    return str(task.get("optimizer") or "another optimizer") if task.get("name") == EXTERNAL_TASK else None


def has_muon_optimizer(spec: Mapping[str, Any]) -> bool:
    """Whether a run's optimizer is a Muon: every run's that the service starts, and a script's by its class."""
    optimizer = recorded_optimizer(spec)
    return optimizer is None or "muon" in optimizer.lower()


def has_loss_scale(spec: Mapping[str, Any]) -> bool:
    """Whether a run scales its loss; of the others DeepSpeed records a scale of 1, which nobody set."""
    return bool(spec.get("precision", Precision.FP16) == Precision.FP16)


def clip_scope(spec: Mapping[str, Any]) -> str:
    """What `gradient_clipping` measures and scales; DeepSpeed's own Muon has its update in the gradient's place."""
    if spec.get("implementation") == Implementation.DEEPSPEED:
        return "update" if has_muon_optimizer(spec) else "gradient"
    return str(spec.get("clip_scope", "gradient"))
