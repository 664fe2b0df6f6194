"""Where the kernels run, and how to switch them off.

They need an NVIDIA GPU of compute capability 9 (Hopper: its bulk copies of tiles) and triton, which torch's CUDA wheels
bring. Everywhere else the same step runs on torch's own products.

The environment variable MUON_CORE_KERNELS, read once, says which matrices they take: `auto` (the default) those large
enough to gain, `all` every one that they can, `off` none.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, Literal

import torch

Mode = Literal["auto", "all", "off"]
MODES: Final = ("auto", "all", "off")
VARIABLE: Final = "MUON_CORE_KERNELS"
# Below this small dimension launches dominate, and torch's products are as quick.
SMALLEST_DIMENSION: Final[dict[Mode, int]] = {"auto": 256, "all": 16}
# Tiles are copied in rows of a multiple of 16 bytes: 8 elements of two bytes.
ROW_MULTIPLE: Final = 8


def mode_from(value: str) -> Mode:
    """Return the mode of that name; raises ValueError for another."""
    for mode in MODES:
        if value == mode:
            return mode
    raise ValueError(f"{VARIABLE}={value!r} is unknown; choose one of {', '.join(MODES)}")


_mode: Mode = mode_from(os.environ.get(VARIABLE, "auto"))


def kernel_mode() -> Mode:
    return _mode


@contextmanager
def kernels(mode: Mode) -> Iterator[None]:
    """Use another mode inside a `with` block, in this process."""
    global _mode
    before, _mode = _mode, mode_from(mode)
    try:
        yield
    finally:
        _mode = before


@cache
def _device_has_kernels(index: int) -> bool:
    has_tile_copies = torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9
    return has_tile_copies and importlib.util.find_spec("triton") is not None


def device_has_kernels(device: torch.device) -> bool:
    """Whether this device can run them at all, and they are not switched off."""
    if device.type != "cuda" or _mode == "off":
        return False
    return _device_has_kernels(torch.cuda.current_device() if device.index is None else device.index)


def shape_has_kernels(rows: int, cols: int) -> bool:
    """Whether the current mode gives matrices of this shape to the kernels."""
    if _mode == "off":
        return False
    return min(rows, cols) >= SMALLEST_DIMENSION[_mode] and not rows % ROW_MULTIPLE and not cols % ROW_MULTIPLE
