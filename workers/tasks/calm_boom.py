"""Two bias-free matrices on constant inputs, of which `boom`'s overflows fp16 on one step while `calm`'s stays finite.

The published inputs came from `torch.randn` on a CUDA device; `cuda_randn` computes the same numbers anywhere, so the
published momentum norms hold on a laptop too.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from muonscope.contract.run_spec import CalmBoomTask
from workers.tasks import Batch, TaskContext

# Finite in fp16, but not after the loss scale: 6e4 * 16 > 65504.
OVERFLOWING_INPUT: Final = 6e4

# Philox4x32-10, as in cuRAND: multipliers and the Weyl increments of the key.
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_LOW_32: Final = np.uint64(0xFFFFFFFF)


def philox4x32(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Return Philox4x32-10 of each counter.

    Args:
        counter: (n, 4), 32-bit words.
        key: two 32-bit words.
    Returns:
        (n, 4), 32-bit words.
    """
    words = [counter[:, index].copy() for index in range(4)]
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (product_1 >> np.uint64(32)) ^ words[1] ^ np.uint64(key_0),
            product_1 & _LOW_32,
            (product_0 >> np.uint64(32)) ^ words[3] ^ np.uint64(key_1),
            product_0 & _LOW_32,
        ]
        key_0, key_1 = (key_0 + _WEYL[0]) % 2**32, (key_1 + _WEYL[1]) % 2**32
    return np.stack(words, axis=1)


def cuda_randn(count: int, seed: int, call: int) -> Tensor:
    """Return what the `call`-th small `torch.randn(count, device="cuda")` after `manual_seed(seed)` gives.

    Holds for counts that one CUDA block covers (fewer than 256): element i is thread i's first normal.

    Returns:
        (count,), fp32.
    """
    if count >= 256:
        raise ValueError(f"count={count} spans several CUDA blocks; at most 255 elements are emulated")
    counter = np.zeros((count, 4), dtype=np.uint64)
    counter[:, 0] = call
    counter[:, 2] = np.arange(count)
    bits = philox4x32(counter, (seed % 2**32, seed >> 32)).astype(np.float32)
    # Box-Muller on uniforms in (0, 1], with cuRAND's constants: 2^-32, and 2^-32 * 2 pi.
    step, turn = np.float32(2.3283064e-10), np.float32(2.3283064e-10 * 6.2831855)
    radius = np.sqrt(np.float32(-2) * np.log(bits[:, 0] * step + step / np.float32(2)))
    angle = bits[:, 1] * turn + turn / np.float32(2)
    return torch.from_numpy(np.sin(angle) * radius)


class CalmBoom(nn.Module):
    """`forward` is the sum of both products: each gradient is its input, repeated over the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.calm = nn.Linear(width, width, bias=False)
        self.boom = nn.Linear(width, width, bias=False)

    def forward(self, calm_input: Tensor, boom_input: Tensor) -> Tensor:
        return self.calm(calm_input).sum() + self.boom(boom_input).sum()


class CalmBoomRun:
    """The same two inputs each step, but for the step on which boom's overflows."""

    def __init__(self, task: CalmBoomTask, context: TaskContext) -> None:
        self.model = CalmBoom(task.width)
        self._overflow_step = task.overflow_step
        draw = cuda_randn if task.width < 256 else _cpu_randn
        self._calm = draw(task.width, context.seed, 0).to(context.dtype).view(1, task.width)
        self._boom = draw(task.width, context.seed, 1).to(context.dtype).view(1, task.width)

    def batch(self, step: int, micro_batch: int) -> Batch:
        if step == self._overflow_step:
            return self._calm, torch.full_like(self._boom, OVERFLOWING_INPUT)
        return self._calm, self._boom

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss


def _cpu_randn(count: int, seed: int, call: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 2 + call) % 2**63)
    return torch.randn(count, generator=generator)


def build(task: CalmBoomTask, context: TaskContext) -> CalmBoomRun:
    return CalmBoomRun(task, context)
