"""Launch a triton kernel without what triton does again at every call: there it finds out which variant to run.

A step launches dozens of kernels, and on a slow host each of triton's own launches takes as long as a product. Here the
variant is looked up by what can change it: constants, types, and whether pointers are aligned to 16 bytes. Kernels
launched this way must not specialize on integers (`do_not_specialize`).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    constants: Sequence[Any],
    *,
    num_warps: int,
    num_stages: int = 3,
    variant: tuple[Any, ...] | None = None,
) -> None:
    """Run `kernel` on a one-dimensional grid.

    Args:
        arguments, constants: by position, the constants last.
        variant: what in the arguments decides the variant; None finds it out from all of them.
    """
    if variant is None:
        variant = tuple(
            (argument.dtype, not argument.data_ptr() % 16)
            if isinstance(argument, Tensor)
            else (type(argument), isinstance(argument, int) and argument >= 1 << 31)
            for argument in arguments
        )
    device = arguments[0].device if isinstance(arguments[0], Tensor) else arguments[0].base.device
    # Kernels live as long as their modules; triton's own hash of one takes a lock.
    key = (id(kernel), device, variant, num_warps, num_stages, *constants)
    compiled = _compiled.get(key)
    if compiled is None:
        # Triton's interpreter compiles nothing, and returns nothing.
        compiled = kernel[(programs,)](*arguments, *constants, num_warps=num_warps, num_stages=num_stages)
        if compiled is not None:
            _compiled[key] = compiled
    else:
        compiled[(programs, 1, 1)](*arguments, *constants)
