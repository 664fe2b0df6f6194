"""What a step reads on the device and never on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Guard:
    """One step's verdict and scale; with neither, it is any step."""

    flag: Tensor | None = None
    """float32, one element; not zero: the step is discarded, so nothing is written."""
    gradient_scale: Tensor | None = None
    """float32, one element: the factor that takes a gradient to its own units."""

    def on(self, device: torch.device) -> "Guard":
        """The same for tensors on that device."""
        flag, scale = self.flag, self.gradient_scale
        return Guard(None if flag is None else flag.to(device), None if scale is None else scale.to(device))
