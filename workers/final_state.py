"""What a run's weights were at its start and are at its end: what moved, how far, and hashes that prove equality.

"Moved" compares with a snapshot taken after `deepspeed.initialize`, in the same dtype. Against the model before
DeepSpeed cast it, casting alone changes nearly every parameter: that misleading count is kept beside the right one.
"""

import base64
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_core.norms import norms
from muonscope.contract.attempts import MAX_KEPT_WEIGHTS, FinalState
from workers.weights import LocalWeight, local_weights, numel_of


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Hash tensors' dtypes, shapes and bytes, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        plain = tensor.detach().contiguous().cpu()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        if plain.numel():
            digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_parameters(parameters: Sequence[nn.Parameter], *, is_first: bool) -> str | None:
    """Hash all parameters, whole and in order, wherever ZeRO keeps them.

    Collective at stage 3: each parameter is gathered in turn.

    Returns:
        The hash on the first rank, None on the others.
    """
    if not any(hasattr(parameter, "ds_tensor") for parameter in parameters):
        return hash_tensors(parameters) if is_first else None
    from deepspeed.runtime.zero import GatheredParameters

    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        with GatheredParameters([parameter]):
            if is_first:
                digest.update(hash_tensors([parameter]).encode())
    return digest.hexdigest() if is_first else None


class InitialWeights:
    """This rank's copy of the weights as training found them."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], before_cast: Sequence[Tensor] | None, rank: int, world_size: int
    ) -> None:
        """Take the snapshot; call it after `deepspeed.initialize` and before the first step.

        Args:
            parameters: the trainable ones, by index.
            before_cast: the same ones as the task built them, whole; None where nobody kept them.
            rank: this rank.
            world_size: of all ranks.
        """
        self._parameters, self._rank, self._world_size = list(parameters), rank, world_size
        pieces = local_weights(parameters, rank, world_size)
        # On the CPU: the device's memory is the run's own.
        self._initial = {piece.index: piece.values.to("cpu", copy=True) for piece in pieces}
        self._cast_changed = (
            None
            if before_cast is None
            else {piece.index: _differs(piece, before_cast[piece.index]) for piece in pieces}
        )

    def compare(self, muon_indices: Sequence[int], group: dist.ProcessGroup | None) -> FinalState:
        """Say what has moved since the snapshot. Collective: every rank calls it and gets the same answer."""
        count = len(self._parameters)
        totals = torch.zeros(4, count, dtype=torch.float64)
        for piece in local_weights(self._parameters, self._rank, self._world_size):
            now, before = piece.values.cpu(), self._initial[piece.index]
            moved = not torch.equal(now, before)
            difference = now.double() - before.double()
            totals[0, piece.index] = moved
            # What the dtype cannot hold before the cast, no weight in that dtype can equal after it.
            totals[1, piece.index] = moved or (self._cast_changed or {}).get(piece.index, False)
            totals[2, piece.index] = norms([difference])[0].square() if moved else 0.0
            totals[3, piece.index] = not bool(now.isfinite().all())
        if group is not None:
            device = self._parameters[0].device
            summed = totals.to(device)
            dist.all_reduce(summed, group=group)
            totals = summed.cpu()
        moved_flags, changed_flags, squares, nonfinite_flags = totals
        motions = squares.sqrt().tolist()
        muon = sorted(muon_indices)
        return FinalState(
            parameters_moved=int((moved_flags > 0).sum()),
            parameters_total=count,
            muon_parameters_moved=int((moved_flags[muon] > 0).sum()),
            muon_parameters_total=len(muon),
            parameters_changed_before_cast=(None if self._cast_changed is None else int((changed_flags > 0).sum())),
            max_weight_motion=_largest([motions[index] for index in muon]),
            nonfinite_parameters=int((nonfinite_flags > 0).sum()),
            parameter_motions=motions,
            weights=self._small_weights(group),
        )

    def _small_weights(self, group: dist.ProcessGroup | None) -> str | None:
        """Return the whole model's weights where they are few. Collective."""
        sizes = [numel_of(parameter) for parameter in self._parameters]
        if sum(sizes) > MAX_KEPT_WEIGHTS:
            return None
        starts = [0, *itertools.accumulate(sizes)]
        whole = torch.zeros(sum(sizes), dtype=torch.float32)
        for piece in local_weights(self._parameters, self._rank, self._world_size):
            whole.narrow(0, starts[piece.index] + piece.start, piece.values.numel()).copy_(piece.values)
        if group is not None:
            # Bits are summed as integers, all but one of them zero: NaN comes through as well.
            bits = whole.view(torch.int32).to(self._parameters[0].device)
            dist.all_reduce(bits, group=group)
            whole = bits.cpu().view(torch.float32)
        return base64.b64encode(whole.numpy().astype("<f4").tobytes()).decode()


def _differs(piece: LocalWeight, whole: Tensor) -> bool:
    before = whole.detach().reshape(-1).narrow(0, piece.start, piece.values.numel())
    return not torch.equal(piece.values.cpu().to(before.dtype), before.cpu())


def _largest(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def peak_memory_bytes(device: Any) -> int:
    """Return the most memory this rank has held: the device's, or the process's on a CPU."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trainable_numel(parameters: Sequence[nn.Parameter]) -> int:
    return sum(numel_of(parameter) for parameter in parameters)
