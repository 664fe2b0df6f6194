"""Per-step measurements, without a host synchronization of their own.

After a step one fused pass takes the norms of this rank's momentum and weights; one small all-reduce on a process
group of its own sums them over the ranks while the next step runs, and the record is read one step later. The record
of the last step waits for nobody: `flush` reads it when the loop ends, however it ends.

Two steps are under way at most, so two sets of buffers take turns (`parcels`), and nothing is allocated while training
goes on.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_core.norms import SquaredNorms
from muon_core.zero.layout import MomentumView, attachment_of, momentum_views
from muon_core.zero.precision import StepOutcome
from muonscope.contract.telemetry import StepRecord
from workers.parcels import Parcel
from workers.weights import local_weights

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
        self._engine = engine
        self._num_parameters = len(parameters)
        self._muon_indices = sorted(muon_indices)
        rank, self._world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._is_first = rank == 0
        weights = local_weights(parameters, rank, self._world_size)
        self._device: torch.device = weights[0].values.device if weights else torch.device(engine.device)
        self._weights = SquaredNorms([p.values for p in weights], [p.index for p in weights], self._device)
        self._nonfinite = torch.zeros(self._num_parameters, dtype=torch.float64, device=self._device)
        self._views: list[MomentumView] = []
        self._momentum = SquaredNorms([], [], self._device)
        parcels = [Parcel(2 * self._num_parameters, len(_SUMMED), self._device, group) for _ in range(2)]
        self._parcels = cycle(parcels)
        self._pending: tuple[Measured, Parcel] | None = None

    def measure(self, measured: Measured) -> StepRecord | None:
        """Start this step's measurements and return the record of the step before, if there is one.

        Collective: every rank calls it after every step.
        """
        # The other one than the step before's, which may still be under way.
        parcel = next(self._parcels)
        self._pack(measured, parcel)
        parcel.send()
        previous = self.flush()
        self._pending = (measured, parcel)
        return previous

    def flush(self) -> StepRecord | None:
        """Return the record that is still under way, complete or with what this rank alone knows; None without one."""
        if self._pending is None:
            return None
        (measured, parcel), self._pending = self._pending, None
        try:
            sums = parcel.read()
        except RuntimeError:
            # A peer vanished before it contributed: its share is not measured, the rest of the record holds.
            return _basic_record(measured)
        return self._record(measured, sums)

    def _pack(self, measured: Measured, parcel: Parcel) -> None:
        count, outcome = self._num_parameters, measured.outcome
        update = attachment_of(self._engine).last_update_norm_squared
        norm = outcome.grad_norm_on_device if self._is_first else None
        known = norm if isinstance(norm, int | float) else 0.0
        parcel.fill([0.0, 0.0, update is not None, outcome.ns_calls, measured.tokens or 0, known])
        views = momentum_views(self._engine)
        if views is not self._views:
            self._views = views
            self._momentum = SquaredNorms(
                [view.view for view in views], [view.parameter_index for view in views], self._device
            )
        self._momentum.write(parcel.vector[:count])
        if not outcome.discarded:
            # A discarded step leaves the weights as they were, and with them this count.
            self._weights.write(self._nonfinite)
            # What is not finite alone differs from itself by something else than zero.
            self._nonfinite.sub_(self._nonfinite).ne_(0.0)
        parcel.vector[count : 2 * count].copy_(self._nonfinite)
        for name, value in (("loss", measured.loss), ("update_norm_squared", update), ("grad_norm", norm)):
            if isinstance(value, Tensor):
                parcel.vector[2 * count + _SUMMED.index(name)].copy_(value, non_blocking=True)

    def _record(self, measured: Measured, sums: Tensor) -> StepRecord:
        count, outcome = self._num_parameters, measured.outcome
        squares = sums[:count].tolist()
        tail = dict(zip(_SUMMED, sums[2 * count :].tolist(), strict=True))
        muon_squares = [squares[index] for index in self._muon_indices]
        has_update = tail["has_update_norm"] > 0 and not outcome.discarded
        return dataclasses.replace(
            _basic_record(measured),
            loss=None if measured.loss is None else tail["loss"] / self._world_size,
            grad_norm=None if outcome.grad_norm_on_device is None else tail["grad_norm"],
            update_norm=tail["update_norm_squared"] ** 0.5 if has_update else None,
            momentum_norm=sum(muon_squares) ** 0.5 if muon_squares else None,
            largest_parameter=self._muon_indices[largest(muon_squares)] if muon_squares else None,
            nonfinite_parameters=int(sums[count : 2 * count].count_nonzero()),
            ns_calls=int(tail["ns_calls"]),
            tokens=None if measured.tokens is None else int(tail["tokens"]),
            parameter_norms=array("f", float32_norms(sums[:count])).tobytes(),
        )


def largest(values: Sequence[float]) -> int:
    """Return the position of the largest value; NaN counts as larger than infinity, and of equals the first wins."""
    for index, value in enumerate(values):
        if value != value:
            return index
    return values.index(max(values))


def float32_norms(squares: Tensor) -> list[float]:
    """Return the roots of float64 squares as float32 values.

    A finite norm beyond float32 becomes its largest number: infinity would claim what is not so.
    """
    exact = squares.sqrt()
    narrow = exact.float()
    return torch.where(exact.isfinite() & narrow.isinf(), torch.finfo(torch.float32).max, narrow).tolist()


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
