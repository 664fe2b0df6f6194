"""Which tile sizes a product runs with: from a file that `tune` wrote on this machine, else from the shipped table.

Nothing is measured while a step runs: a first step waits for triton's compiler at most, some seconds, and once, for
triton keeps what it compiled on disk.
"""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How one product is cut into tiles."""

    tile: int = 128
    """Rows of a tile, and its columns where `halves` is 1."""
    halves: int = 1
    """2: a tile is twice as wide as high."""
    tile_k: int = 64
    num_warps: int = 4
    num_stages: int = 3


# Two programs of 96 KiB fit on a multiprocessor.
DEFAULT: Final = ProductConfig()

CANDIDATES: Final = (
    ProductConfig(128, 1, 64, 4, 3),
    ProductConfig(128, 1, 64, 8, 3),
    ProductConfig(128, 1, 64, 4, 4),
    ProductConfig(128, 1, 128, 4, 2),
    ProductConfig(128, 1, 32, 4, 6),
    ProductConfig(128, 2, 64, 8, 3),
    ProductConfig(128, 2, 64, 8, 4),
    ProductConfig(64, 2, 64, 4, 4),
    ProductConfig(64, 1, 64, 4, 4),
)


@cache
def product_config(n_size: int, k_size: int, *, transposed: bool, device: torch.device) -> ProductConfig:
    """Return the configuration for (n x k)(k x n) products on a device."""
    tuned = _tuned(torch.cuda.get_device_name(device)).get(product_key(n_size, k_size, transposed))
    return tuned or shipped_config(n_size, k_size, transposed)


def shipped_config(n_size: int, k_size: int, transposed: bool) -> ProductConfig:
    """What one H200 was fastest with on the matrices of GPT-2 small to XL and Llama-7B; see docs/benchmarks.md."""
    if k_size > n_size and n_size <= 2048:
        return ProductConfig(128, 1, 64, 4, 4)
    if k_size > n_size and transposed:
        return ProductConfig(128, 1, 32, 4, 6)
    return DEFAULT


def product_key(n_size: int, k_size: int, transposed: bool) -> str:
    return f"{n_size}x{k_size}{'t' if transposed else ''}"


def cache_file(device_name: str) -> Path:
    """Where this user's tuned configurations for a device lie."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "muon_core" / f"products-{device_name.replace(' ', '-').replace('/', '-')}.json"


@cache
def _tuned(device_name: str) -> dict[str, ProductConfig]:
    return read_configs(cache_file(device_name))


def read_configs(path: Path) -> dict[str, ProductConfig]:
    """Read a file of tuned configurations; one that cannot be used is said so once, and counts as none."""
    try:
        return {key: ProductConfig(**fields) for key, fields in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): the shipped tile sizes are used; delete it or tune again", path, error)
        return {}


def write_configs(path: Path, configs: dict[str, ProductConfig]) -> None:
    """Add configurations to a file, whole or not at all, for processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**read_configs(path), **configs}
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps({key: asdict(config) for key, config in sorted(merged.items())}, indent=1) + "\n")
    draft.replace(path)


def tune(shapes: Iterable[tuple[int, int]], device: torch.device | str = "cuda") -> Path:
    """Measure every candidate on matrices of the given shapes and keep the fastest on disk; some seconds a shape.

    Args:
        shapes: (rows, cols) of the matrices that will be trained.
        device: which GPU; the file is for its model.
    Returns:
        The file, read by every later process on this machine.
    """
    from triton.testing import do_bench

    from muon_core.kernels.products import symmetric_product

    device, found = torch.device(device), {}
    for n_size, k_size, transposed in sorted(set(_products_of(shapes))):
        # As many as a step's batches hold: fewer would leave the last round of tiles half empty.
        batch = min(max((1 << 26) // (n_size * k_size), 4), 64)
        size = (batch, k_size, n_size) if transposed else (batch, n_size, k_size)
        operand = torch.randn(size, device=device, dtype=torch.float16) / k_size**0.5
        out = torch.empty(batch, n_size, n_size, device=device, dtype=torch.float16)
        times = {}
        for config in CANDIDATES:

            def run(config: ProductConfig = config) -> None:
                symmetric_product(operand, operand, out, transposed=transposed, config=config)  # noqa: B023

            times[config] = do_bench(run, warmup=5, rep=20, return_mode="median")
        found[product_key(n_size, k_size, transposed)] = min(times, key=times.__getitem__)
    path = cache_file(torch.cuda.get_device_name(device))
    write_configs(path, found)
    _tuned.cache_clear()
    product_config.cache_clear()
    return path


def _products_of(shapes: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int, bool]]:
    for rows, cols in shapes:
        short, long = sorted((rows, cols))
        yield short, short, False
        yield short, long, rows > cols
