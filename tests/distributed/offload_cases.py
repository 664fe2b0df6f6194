"""What optimizer offload does with gradients that no backward pass has renewed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_core.zero.precision import engine_step
from tests.distributed.scenario import digest, ds_config, full_momentum, muon_engine

OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
# DeepSpeed otherwise insists on its own Adam where it offloads.
ALLOW: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False}


class Branches(nn.Module):
    """Two matrices, of which a step may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(16, 12, bias=False)
        self.sometimes = nn.Linear(16, 12, bias=False)

    def forward(self, x: Tensor, factor: float | None) -> Tensor:
        out = self.always(x)
        return (out if factor is None else out + self.sometimes(x * factor)).float().square().mean()


def an_idle_parameter_after_a_discarded_step(*, stage: int, is_offloaded: bool) -> dict[str, Any]:
    """Step 1 overflows in a branch that step 2 does not use."""
    torch.manual_seed(0)
    config = ds_config(
        stage=stage, fp16={"loss_scale": 64}, zero=OFFLOAD if is_offloaded else None, **(ALLOW if is_offloaded else {})
    )
    with muon_engine(Branches(), config, lr=0.05, iteration_dtype=torch.float32) as (engine, optimizer):
        discarded, momenta = [], []
        for step, factor in enumerate((1.0, 6e4, None, 1.0)):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 16, generator=generator).half().to(engine.device)
            engine.backward(engine(x, factor))
            discarded.append(engine_step(engine).discarded)
            momenta.append(full_momentum(engine))
        return {
            "discarded": discarded,
            "bits": [digest(momentum) for momentum in momenta],
            "finite": all(torch.isfinite(tensor).all().item() for tensor in momenta[-1].values()),
            "devices": {str(tensor.device) for state in optimizer.state.values() for tensor in state.values()},
            "is_offloaded": optimizer.partitions.is_offloaded,
        }
