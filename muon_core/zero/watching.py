"""Read an engine that somebody else has set up, whichever optimizer runs under its ZeRO.

    watch_engine(engine)     after `deepspeed.initialize`; what `attach` or `install` left is used as it is

DeepSpeed's own Muon is watched as a release is (`released`); of any other optimizer the momentum that it keeps beside
its flat partitions is read where it lies. Nothing of the training is changed.
"""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from muon_core.errors import NotAttached
from muon_core.zero import released
from muon_core.zero.layout import (
    Attachment,
    MomentumView,
    ViewCache,
    ZeroPartitions,
    attachment_of,
    partitions_of,
    register_attachment,
)
from muon_core.zero.optimizer import ZeroMuon

# Where optimizers keep what corresponds to a momentum: Adam and its kin, then SGD.
_MOMENTUM_KEYS: Final = ("exp_avg", "momentum_buffer")


def watch_engine(engine: Any) -> Attachment:
    """Make an engine's momentum readable; call on every rank, after `deepspeed.initialize`.

    Raises:
        UnsupportedSetup: no ZeRO stage 1, 2 or 3, or a layout that cannot be read; the message says what to change.
        NotAttached: the optimizer is muon_core's own, and `attach` has not seen this engine.
    """
    try:
        return attachment_of(engine)
    except NotAttached:
        pass
    inner = getattr(engine.optimizer, "optimizer", None)
    if isinstance(inner, ZeroMuon):
        # Its own refusal comes with the first step that is applied: at a high loss scale only after many.
        raise NotAttached(
            "this engine's optimizer is muon_core's, which has not been attached to it",
            "call muon_core.attach(engine, optimizer) on every rank before",
        )
    if type(inner).__name__ == "MuonWithAuxAdam":
        return released.watch(engine)
    watched = WatchedOptimizer(engine)
    register_attachment(engine, watched)
    return watched


class WatchedOptimizer:
    """Any optimizer without Muon on one engine: read, and otherwise left alone."""

    def __init__(self, engine: Any) -> None:
        self.partitions: ZeroPartitions = partitions_of(engine, {})
        self.stage = self.partitions.stage
        self.ns_calls = 0
        self.last_update_norm_squared: Tensor | None = None
        self._optimizer = engine.optimizer.optimizer
        self._views = ViewCache()

    def momentum_views(self) -> list[MomentumView]:
        buffers = [self._momentum_buffer(self.partitions.flat(each)) for each in self.partitions.partitions]
        return self._views.views(buffers, lambda: self._make_views(buffers))

    def _momentum_buffer(self, flat: Tensor) -> Tensor | None:
        state = self._optimizer.state.get(flat, {})
        found = (state.get(key) for key in _MOMENTUM_KEYS)
        # Only what is laid out as the weights are can be taken apart by parameter.
        return next((each for each in found if isinstance(each, Tensor) and each.numel() == flat.numel()), None)

    def _make_views(self, buffers: Sequence[Tensor | None]) -> list[MomentumView]:
        views = []
        for partition, buffer in zip(self.partitions.partitions, buffers, strict=True):
            for parameter in partition.parameters if buffer is not None else ():
                fragment = parameter.fragments[self.partitions.rank]
                if fragment.numel:
                    assert buffer is not None
                    piece = buffer.view(-1).narrow(0, fragment.offset, fragment.numel)
                    views.append(MomentumView(parameter.index, piece, "adamw"))
        return sorted(views, key=lambda view: view.parameter_index)
