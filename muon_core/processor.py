"""In which dtype Newton-Schulz iterates on a CPU: in the one whose products the processor has instructions for.

bfloat16 where the processor's flags name such instructions, float32 everywhere else. Emulated, bfloat16 is many times
slower than float32; native, it is several times faster, and what `torch.optim.Muon` iterates in anywhere.

The flags decide, never a timing: they say the same at every start and on every rank of one kind of machine. Where ranks
differ, `attach` has all of them take float32.

The environment variable MUON_CORE_CPU_DTYPE, read once, decides otherwise: `auto` (the default), `bfloat16`, `float32`.
"""

import os
from functools import cache
from pathlib import Path
from typing import Final

import torch

VARIABLE: Final = "MUON_CORE_CPU_DTYPE"
CHOICES: Final[dict[str, torch.dtype | None]] = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
NATIVE_BFLOAT16: Final = frozenset({"amx_bf16", "avx512_bf16"})
_CPUINFO: Final = Path("/proc/cpuinfo")


def choice_from(value: str) -> torch.dtype | None:
    """Return the dtype of that name, None for `auto`; raises ValueError for another."""
    if value not in CHOICES:
        raise ValueError(f"{VARIABLE}={value!r} is unknown; choose one of {', '.join(CHOICES)}")
    return CHOICES[value]


_choice = choice_from(os.environ.get(VARIABLE, "auto"))


def cpu_iteration_dtype() -> torch.dtype:
    """The dtype of this process, the same at every call."""
    return _choice or _dtype_of_flags(processor_flags())


@cache
def processor_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Return what Linux says that the first processor can do; empty where nothing says it."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() == "flags")
    return frozenset(next(found, []))


def _dtype_of_flags(flags: frozenset[str]) -> torch.dtype:
    # Without oneDNN torch computes bfloat16 products one by one, whatever the processor has.
    is_native = bool(flags & NATIVE_BFLOAT16) and torch.backends.mkldnn.is_available()
    return torch.bfloat16 if is_native else torch.float32
