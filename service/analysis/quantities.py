"""What a recorded quantity is in a run: under one name two runs may have recorded two. Pure."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from muonscope.contract.spec_facts import clip_scope, has_loss_scale, has_muon_optimizer, recorded_optimizer
from muonscope.contract.status import Implementation, MomentumUnit
from service.columns import StepColumns

_LOSS_SCALES: Final = ("loss_scale_before", "loss_scale_after")


def meaning(name: str, spec: Mapping[str, Any], unit: MomentumUnit | None) -> str | None:
    """Say what a run recorded under this name; None where every run records the same."""
    if name == "grad_norm":
        # muon_core records the gradient's whatever it clips: DeepSpeed takes the norm before any update is there.
        is_native = spec.get("implementation") == Implementation.DEEPSPEED
        return f"the norm of the {clip_scope(spec) if is_native else 'gradient'}"
    if name == "momentum_norm":
        if unit is None:
            return "a norm whose unit was not recorded"
        times = " times the loss scale" if unit == MomentumUnit.LOSS_SCALED and has_loss_scale(spec) else ""
        return f"the norm of {_momentum(spec)}{times}"
    if name in _LOSS_SCALES:
        return "the loss scale" if has_loss_scale(spec) else "none"
    return None


def _momentum(spec: Mapping[str, Any]) -> str:
    """Muon's is of its matrices alone; what another optimizer keeps is a mean or sum of its own, of every parameter."""
    if has_muon_optimizer(spec):
        return "Muon's momentum"
    optimizer = recorded_optimizer(spec) or ""
    return "Adam's first moment" if "adam" in optimizer.lower() else f"{optimizer}'s momentum"


def is_recorded(name: str, spec: Mapping[str, Any]) -> bool:
    """Whether the run has what it recorded under this name: DeepSpeed records a loss scale of 1 where there is none."""
    return name not in _LOSS_SCALES or has_loss_scale(spec)


def clipping(spec: Mapping[str, Any], columns: StepColumns) -> dict[str, Any] | None:
    """Say how often clipping acted; None where there is none.

    Returns:
        The `limit`, the `scope`, how many `applied` steps say what was measured, and of them those on which clipping
        `acted`: null where the recorded norm is not the one that was clipped by.
    """
    limit = spec.get("gradient_clipping")
    if not limit:
        return None
    scope = clip_scope(spec)
    is_recorded = meaning("grad_norm", spec, None) == f"the norm of the {scope}"
    measured = ~columns.discarded & columns.measured["grad_norm"]
    norms = columns.values["grad_norm"][measured]
    acted = int(np.count_nonzero(norms > limit)) if is_recorded and len(norms) else None
    applied = len(norms) if is_recorded else int((~columns.discarded).sum())
    return {"limit": limit, "scope": scope, "applied": applied, "acted": acted}
