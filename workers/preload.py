"""What an idle Ray worker process imports while it waits, so that an attempt's ranks need not.

Ray imports this module in each worker process it starts on a cluster whose environment says
`RAY_preload_python_modules=workers.preload` (`workers.warm_pool.ray_start_environment`). Nothing of a run is here: a
process that has only imported libraries is as good as a new one.
"""

import os

from workers.environment import has_gpu_driver, keep_compiler_unloaded, prepare_environment

# Set in the process that supervises a job's driver, and in no other: it trains nothing.
_IS_SUPERVISOR = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in os.environ

if not _IS_SUPERVISOR:
    prepare_environment()
    import torch  # noqa: F401

    keep_compiler_unloaded()
    if not has_gpu_driver():
        # With a GPU, DeepSpeed chooses its accelerator at import, and Ray has not yet said which device is this one's.
        import workers.train_loop  # noqa: F401
