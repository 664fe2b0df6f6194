"""DeepSpeed releases as they are: their own Muon watched and counted, and nothing in it changed.

    watch(engine)       after `deepspeed.initialize` with a "Muon" optimizer block, under any release from 0.17.6 on

What differs between releases is when the momentum moves, and where `muon_update` is looked up: releases to 0.19.7
import it into the ZeRO modules by name, 0.19.8 asks its own module at each call. The name is wrapped in all of them,
for as long as the ZeRO optimizer runs Muon, by a function that counts and hands on what it was given.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from muon_core.errors import UnsupportedSetup
from muon_core.zero.deepspeed_native import NativeMuon
from muon_core.zero.layout import register_attachment
from muon_core.zero.precision import StepHooks

_UPDATE: Final = "muon_update"
_HOLDERS: Final = (
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
)
# The methods in which a ZeRO optimizer runs Muon, by stage; a release has at least one of its stage's.
_RUNS_MUON: Final[dict[int, tuple[str, ...]]] = {
    1: ("get_flat_partition",),
    2: ("get_flat_partition",),
    3: ("_apply_distributed_muon_update", "_muon_update_sub_group"),
}


def watch(engine: Any) -> "ReleasedMuon":
    """Read and count an engine's own Muon; call on every rank, after `deepspeed.initialize`.

    Raises:
        UnsupportedSetup: another optimizer, or a ZeRO layout that cannot be read.
    """
    if type(getattr(engine.optimizer, "optimizer", None)).__name__ != "MuonWithAuxAdam":
        raise UnsupportedSetup(
            "the engine does not run DeepSpeed's own Muon", 'give deepspeed.initialize an optimizer block "Muon"'
        )
    muon = ReleasedMuon(engine)
    register_attachment(engine, muon)
    return muon


class ReleasedMuon(NativeMuon):
    """A release's own Muon on one engine: the attachment of such engines."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        zero = self.partitions.zero
        methods = [name for name in _RUNS_MUON[self.stage] if hasattr(zero, name)]
        if not methods:
            raise UnsupportedSetup(
                f"this DeepSpeed runs Muon at ZeRO stage {self.stage} where it cannot be counted",
                "choose a release that is on the allow-list",
            )
        for name in methods:
            setattr(zero, name, self._standing_in(getattr(zero, name)))
        self._optimizer.register_step_pre_hook(self._measure_update)
        StepHooks(zero, self, hold_scale=False)

    def before_check(self) -> None:
        super().before_check()
        # Releases that compute no norm on a discarded step would leave the one of the step before.
        self.partitions.zero._global_grad_norm = None

    def after_step(self, overflow: bool) -> None:
        """The release keeps its own order: nothing is done here."""

    @contextmanager
    def _update_in_place(self) -> Iterator[None]:
        held = [
            (module, getattr(module, _UPDATE))
            for module in map(sys.modules.get, _HOLDERS)
            if module is not None and hasattr(module, _UPDATE)
        ]
        for module, stock in held:
            setattr(module, _UPDATE, self._counting(stock))
        try:
            yield
        finally:
            for module, stock in held:
                setattr(module, _UPDATE, stock)

    def _counting(self, stock: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Tensor:
            self.ns_calls += 1
            update: Tensor = stock(*args, **options)
            return update

        return counted
