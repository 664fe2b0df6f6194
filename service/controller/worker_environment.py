"""The environment that drivers and workers run in: what changes the code path or finds the code, and no secret."""

import os
from pathlib import Path
from typing import Final

import service

# What a Ray that we start is told besides: it keeps idle workers that have imported what ranks need, so that a rank
# starts seconds sooner. The workers' room says the same of itself (`workers.warm_pool.ray_start_environment`), and a
# test holds the two equal; importing it here would load what this process must stay free of.
WARM_POOL: Final = {"RAY_preload_python_modules": "workers.preload", "RAY_enable_worker_prestart": "true"}


def worker_environment(*, has_gpus: bool) -> dict[str, str]:
    """Return the variables of every process of a job.

    Args:
        has_gpus: whether real GPUs are there. Without, ranks share the processor: one thread each, and neither
            compilation nor a search for accelerators, which cost seconds of every start.
    """
    environment = {"PYTHONPATH": _python_path()}
    if not has_gpus:
        environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    return environment


def _python_path() -> str:
    # Where this package was found, `workers` is found: in a source checkout as in an installed environment.
    root = str(Path(service.__path__[0]).parent)
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    return os.pathsep.join([root, *others])


def count_real_gpus() -> int:
    """Count the GPUs that this process may use; 0 where there are none or no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        # No driver, no library, or a driver that is broken: there is no GPU to use, whichever it is.
        return 0
