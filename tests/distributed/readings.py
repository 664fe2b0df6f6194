"""How tests compare what the ranks returned."""

import os
from typing import Any

import pytest
import torch

# float32 rounds at 6e-8; eight steps through five Newton-Schulz iterations leave a few units in the last places.
FP32_TOLERANCE = 2e-5


# Offloading moves the elementwise work to the processor. Where ranks run on GPUs that is another arithmetic, and only
# the comparisons within rounding hold.
RUNS_ON_GPUS = os.environ.get("DS_ACCELERATOR") == "cuda"
on_one_device = pytest.mark.skipif(RUNS_ON_GPUS, reason="equal bits are claimed where both runs are on the CPU")


def relative(a: list[Any], b: list[Any]) -> float:
    """The distance of two sets of weights, over the size of the first."""
    x, y = (torch.cat([torch.tensor(part).double().flatten() for part in whole]) for whole in (a, b))
    return ((x - y).norm() / x.norm()).item()


def trajectory(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Bits of momentum and weights after every applied step."""
    return [(row["momentum"], row["weights"]) for row in run["rows"] if not row["discarded"]]
