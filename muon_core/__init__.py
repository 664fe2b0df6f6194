"""Muon whose momentum no discarded step can touch: for plain torch, and under DeepSpeed's ZeRO."""

from muon_core.muon import Muon
from muon_core.newton_schulz import orthogonalize
from muon_core.parameters import Routed, route_parameters
from muon_core.zero.consolidated import load_consolidated, save_consolidated
from muon_core.zero.optimizer import ZeroMuon, attach, build_optimizer

__all__ = [
    "Muon",
    "Routed",
    "ZeroMuon",
    "attach",
    "build_optimizer",
    "load_consolidated",
    "orthogonalize",
    "route_parameters",
    "save_consolidated",
]
