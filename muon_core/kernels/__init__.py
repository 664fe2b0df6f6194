"""Muon's step on Hopper GPUs: symmetric batched products, and passes that touch every element once."""

from muon_core.kernels.availability import device_has_kernels, kernel_mode, kernels, shape_has_kernels
from muon_core.kernels.guard import Guard

__all__ = ["Guard", "device_has_kernels", "kernel_mode", "kernels", "shape_has_kernels"]
