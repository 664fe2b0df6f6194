"""What is measured: sets of matrices from real models, and the floor that arithmetic sets for each."""

from typing import Final

import torch

Shape = tuple[int, int]

# bf16 and fp16 products on one H200, random data: what its tensor cores reach, in floating-point operations a second.
TENSOR_CORE_RATE: Final = 790e12


def _gpt2(layers: int, width: int) -> list[Shape]:
    """Query, key, value and output; then the two of the MLP."""
    return ([(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]) * layers


SETS: Final[dict[str, list[Shape]]] = {
    "S": _gpt2(12, 768),  # GPT-2 small
    "M": _gpt2(24, 1024),  # GPT-2 medium
    "X": _gpt2(12, 1600),  # 12 layers of GPT-2 XL
    "L": ([(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]) * 4,  # 4 blocks of Llama-7B
}


def floor_ms(shapes: list[Shape], steps: int = 5, restarts: int = 1) -> float:
    """Time that the symmetric products of the Gram form alone would take at the tensor cores' rate.

    n x n products compute one triangle; of the others, two Gram products compute one as well.
    """
    operations = 0.0
    for rows, cols in shapes:
        n, m = sorted((rows, cols))
        # Iteration 1 of each run costs 3 products of n^3, the last one 2, those between 4; see `_Iteration`.
        runs = 1 + restarts
        products = 4 * steps - 3 * runs
        operations += products * n**3 + runs * n * n * m + runs * 2 * n * n * m
    return operations / TENSOR_CORE_RATE * 1e3


def matrices(shapes: list[Shape], device: torch.device | str = "cuda", seed: int = 0) -> list[torch.Tensor]:
    """Float32 Gaussian matrices."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device) for shape in shapes]


def elements(shapes: list[Shape]) -> int:
    return sum(rows * cols for rows, cols in shapes)
