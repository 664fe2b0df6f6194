"""What `gradient_clipping` measures and scales.

    gradient     one norm over all gradients, as DeepSpeed clips for any optimizer; DeepSpeed itself does it
    update       what DeepSpeed 0.19.8 does to its own Muon: one norm over Muon's updates (before lr) and AdamW's
                 gradients together, both scaled by it; the momentum sees the gradient unclipped
    muon_exempt  AdamW's gradients by their own norm; Muon's not at all, for its update has one size whatever theirs

The last two need every partition before the first is stepped, so they work in the moment between DeepSpeed's check and
its first step: the step is known to survive, and no gradient has been consumed. They add one all-reduce of one number.
"""

from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muon_core.zero.layout import Partition, ZeroPartitions

ClipScope = Literal["gradient", "update", "muon_exempt"]
CLIP_SCOPES: Final = ("gradient", "update", "muon_exempt")
# DeepSpeed's own guard against a norm of zero.
_EPSILON: Final = 1e-6


class ClipHost(Protocol):
    """What clipping needs of the optimizer."""

    @property
    def partitions(self) -> ZeroPartitions: ...

    def group_of(self, partition: Partition) -> dict[str, Any]: ...

    def take_update(self, partition: Partition, gradient: Tensor) -> Tensor: ...


class Clipping:
    """Carries one engine's clipping out, where DeepSpeed does not."""

    def __init__(self, host: ClipHost, scope: ClipScope, max_norm: float) -> None:
        self._host, self._scope, self._max_norm = host, scope, max_norm
        self.is_ours = scope != "gradient" and max_norm > 0
        """Off, DeepSpeed clips, or nobody does."""
        self.last_norm: Tensor | None = None
        """What the newest applied step measured, over all ranks; None where it was not ours to measure."""
        self.num_all_reduces = 0
        self._factor: Tensor | None = None
        self._updates: dict[int, Tensor] = {}

    def before_check(self) -> None:
        self.last_norm = self._factor = None
        self._updates.clear()
        if self.is_ours:
            # Again at each step: loading a checkpoint brings back the value it was saved under.
            self._host.partitions.zero.clip_grad = 0.0

    def survived(self) -> None:
        """Measure, once the step is known to be applied; collective."""
        if not self.is_ours:
            return
        partitions = self._host.partitions
        total = torch.zeros((), dtype=torch.float32, device=partitions.device)
        for partition in partitions.partitions:
            is_muon = self._host.group_of(partition)["route"] == "muon"
            if is_muon and self._scope == "muon_exempt":
                continue
            measured = partitions.reduced_gradient(partition)
            if is_muon:
                measured = self._updates[partition.number] = self._host.take_update(partition, measured)
            total += torch.linalg.vector_norm(measured).square().to(total.device)
        dist.all_reduce(total, group=partitions.process_group)
        self.num_all_reduces += 1
        self.last_norm = total.sqrt()
        self._factor = 1.0 / ((self.last_norm + _EPSILON) / self._max_norm).clamp(min=1.0)

    def muon_update(self, partition: Partition, gradient: Tensor) -> Tensor:
        """Return the update to apply to a Muon partition."""
        update = self._updates.pop(partition.number, None)
        if update is None:
            return self._host.take_update(partition, gradient)
        assert self._factor is not None
        return update.mul_(self._factor.to(update.device))

    def adamw_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient that AdamW steps on, scaled in place."""
        return gradient if self._factor is None else gradient.mul_(self._factor.to(gradient.device))
