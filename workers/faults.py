"""The experiment's own overflow: a planted inf or nan, exact in step, rank, micro-batch and parameter.

A parameter's fault changes one element of that micro-batch's gradient, before DeepSpeed accumulates or reduces it;
a fault without a parameter is planted in the loss, and so in every gradient.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn

from muonscope.contract.run_spec import Fault
from workers.errors import ConfigRefused

_VALUES: Final = {"inf": math.inf, "nan": math.nan}


class FaultPlan:
    """One rank's share of a run's faults."""

    def __init__(self, faults: Sequence[Fault], model: nn.Module, rank: int) -> None:
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for index, fault in enumerate(faults):
            if fault.parameter is not None and fault.parameter not in parameters:
                known = ", ".join(list(parameters)[:8])
                raise ConfigRefused(
                    f"faults[{index}].parameter={fault.parameter!r} is not a trainable parameter of this task; "
                    f"its first ones are: {known}"
                )
        self._faults: dict[tuple[int, int], list[Fault]] = {}
        for fault in faults:
            if fault.rank == rank:
                self._faults.setdefault((fault.step, fault.micro_batch), []).append(fault)
        self._parameters = parameters

    @contextmanager
    def planted(self, step: int, micro_batch: int) -> Iterator[None]:
        """While open, the backward pass of this micro-batch meets its parameter faults."""
        hooks = []
        for fault in self._faults.get((step, micro_batch), ()):
            if fault.parameter is not None:
                hook = _spoil_with(_VALUES[fault.kind])
                hooks.append(self._parameters[fault.parameter].register_hook(hook))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def in_loss(self, step: int, micro_batch: int, loss: Tensor) -> Tensor:
        """Return the loss with this micro-batch's loss fault in it, if it has one."""
        for fault in self._faults.get((step, micro_batch), ()):
            if fault.parameter is None:
                loss = loss * _VALUES[fault.kind]
        return loss


def _spoil_with(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled[(0,) * spoiled.ndim] = value
        return spoiled

    return spoil
