"""Per-step measurements, without a host synchronization of their own.

After a step one fused pass takes the norms of this rank's momentum and weights; one small all-reduce on a process
group of its own sums them over the ranks while the next step runs, and the record is read one step later. The record
of the last step waits for nobody: `flush` reads it when the loop ends, however it ends.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_core.zero.layout import attachment_of, momentum_views
from muon_core.zero.precision import StepOutcome
from muonscope.contract.telemetry import StepRecord
from workers.weights import local_weights, norms

# The packed vector's tail, after two values a parameter: squared momentum norm, and 1 if its weights are non-finite.
_SUMMED: Final = ("loss", "update_norm_squared", "has_update_norm", "ns_calls", "tokens", "grad_norm")


@dataclass(frozen=True, slots=True)
class Measured:
    """What this rank alone knows about a step that has just run."""

    step: int
    outcome: StepOutcome
    loss: Tensor | None
    """Mean over this rank's micro-batches, on the device, detached; None where nobody saw it, on all ranks alike."""
    step_time_s: float
    tokens: int | None


class Probes:
    """Turns each step's outcome into a record, one step late."""

    def __init__(
        self,
        engine: Any,
        parameters: Sequence[nn.Parameter],
        muon_indices: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Start measuring.

        Args:
            engine: attached; its momentum and weights are read after each step.
            parameters: the trainable ones, by index.
            muon_indices: which of them Muon trains: their momentum makes up `momentum_norm`.
            group: the probes' own group over all ranks; None with a single rank.
        """
        self._engine, self._group = engine, group
        self._num_parameters = len(parameters)
        self._muon_indices = sorted(muon_indices)
        rank, self._world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._is_first = rank == 0
        weights = local_weights(parameters, rank, self._world_size)
        device = weights[0].values.device if weights else engine.device
        self._weights = [piece.values for piece in weights]
        self._weight_indices = torch.tensor([piece.index for piece in weights], dtype=torch.long, device=device)
        self._nonfinite = torch.zeros(self._num_parameters, dtype=torch.float64, device=device)
        self._device = device
        self._momentum_indices: Tensor | None = None
        self._pending: tuple[Measured, _Summation] | None = None

    def measure(self, measured: Measured) -> StepRecord | None:
        """Start this step's measurements and return the record of the step before, if there is one.

        Collective: every rank calls it after every step.
        """
        summation = _Summation(self._pack(measured), self._group)
        previous = self.flush()
        self._pending = (measured, summation)
        return previous

    def flush(self) -> StepRecord | None:
        """Return the record that is still under way, complete or with what this rank alone knows; None without one."""
        if self._pending is None:
            return None
        (measured, summation), self._pending = self._pending, None
        try:
            sums = summation.read()
        except RuntimeError:
            # A peer vanished before it contributed: its share is not measured, the rest of the record holds.
            return _basic_record(measured)
        return self._record(measured, sums)

    def _pack(self, measured: Measured) -> Tensor:
        views = momentum_views(self._engine)
        squares = torch.zeros(self._num_parameters, dtype=torch.float64, device=self._device)
        if views:
            if self._momentum_indices is None or len(self._momentum_indices) != len(views):
                self._momentum_indices = torch.tensor([view.parameter_index for view in views], device=self._device)
            squares.index_add_(
                0, self._momentum_indices, norms([view.view for view in views]).square_().to(self._device)
            )
        if not measured.outcome.discarded and self._weights:
            # A discarded step leaves the weights as they were, and with them this count.
            self._nonfinite.zero_()
            self._nonfinite.index_add_(0, self._weight_indices, (~norms(self._weights).isfinite()).double())
        outcome, update = measured.outcome, attachment_of(self._engine).last_update_norm_squared
        host = torch.tensor(
            [0.0, 0.0, update is not None, outcome.ns_calls, measured.tokens or 0, 0.0], dtype=torch.float64
        )
        tail = host.to(self._device, non_blocking=True)
        if measured.loss is not None:
            tail[0] = measured.loss
        if update is not None:
            tail[1] = update
        if self._is_first and outcome.grad_norm_on_device is not None:
            tail[5] = outcome.grad_norm_on_device
        return torch.cat((squares, self._nonfinite, tail))

    def _record(self, measured: Measured, sums: Sequence[float]) -> StepRecord:
        count, outcome = self._num_parameters, measured.outcome
        squares, nonfinite = sums[:count], sums[count : 2 * count]
        tail = dict(zip(_SUMMED, sums[2 * count :], strict=True))
        muon_squares = [squares[index] for index in self._muon_indices]
        has_update = tail["has_update_norm"] > 0 and not outcome.discarded
        return dataclasses.replace(
            _basic_record(measured),
            loss=None if measured.loss is None else tail["loss"] / self._world_size,
            grad_norm=None if outcome.grad_norm_on_device is None else tail["grad_norm"],
            update_norm=tail["update_norm_squared"] ** 0.5 if has_update else None,
            momentum_norm=sum(muon_squares) ** 0.5 if muon_squares else None,
            largest_parameter=self._muon_indices[largest(muon_squares)] if muon_squares else None,
            nonfinite_parameters=sum(value > 0 for value in nonfinite),
            ns_calls=int(tail["ns_calls"]),
            tokens=None if measured.tokens is None else int(tail["tokens"]),
            parameter_norms=array("f", (_float32(square**0.5) for square in squares)).tobytes(),
        )


def largest(values: Sequence[float]) -> int:
    """Return the position of the largest value; NaN counts as larger than infinity, and of equals the first wins."""
    return max(range(len(values)), key=lambda index: (values[index] != values[index], values[index], -index))


def _float32(value: float) -> float:
    # A finite norm beyond fp32 is recorded as its largest number: infinity would claim what is not so.
    return value if value != value or value == float("inf") else min(value, _LARGEST_FLOAT32)


_LARGEST_FLOAT32: Final = torch.finfo(torch.float32).max


def _basic_record(measured: Measured) -> StepRecord:
    outcome = measured.outcome
    return StepRecord(
        step=measured.step,
        overflow=outcome.overflow,
        discarded=outcome.discarded,
        loss_scale_before=outcome.loss_scale_before,
        loss_scale_after=outcome.loss_scale_after,
        lr=outcome.lr,
        step_time_s=measured.step_time_s,
    )


class _Summation:
    """One packed vector on its way: summed over the ranks and copied to the host while training goes on."""

    def __init__(self, packed: Tensor, group: dist.ProcessGroup | None) -> None:
        self._host = packed
        self._work: Any = None
        self._arrived: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._send_through_side_stream(packed, group)
        elif group is not None:
            self._work = dist.all_reduce(packed, group=group, async_op=True)

    def read(self) -> list[float]:
        """Wait for the sums, if they are not here yet. Raises RuntimeError when a peer is gone."""
        if self._arrived is not None:
            self._arrived.synchronize()
        elif self._work is not None:
            self._work.wait()
        values: list[float] = self._host.tolist()
        return values

    def _send_through_side_stream(self, packed: Tensor, group: dist.ProcessGroup | None) -> None:
        # On a stream of its own: reading the result must not wait for the next step's kernels.
        stream = _side_stream(packed.device)
        stream.wait_stream(torch.cuda.current_stream(packed.device))
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            if group is not None:
                dist.all_reduce(packed, group=group)
            self._host.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        packed.record_stream(stream)


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
