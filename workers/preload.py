"""What an idle Ray worker process does while it waits: it sees to it that this node's fork server runs.

Ray imports this module in each worker process it starts on a cluster whose environment says
`RAY_preload_python_modules=workers.preload` (`workers.warm_pool.ray_start_environment`). So the first attempt finds the
server with its imports done.
"""

import os
import sys

from workers.environment import prepare_environment
from workers.fork_client import ensure_server

# Set in the process that supervises a job's driver, and in no other: it trains nothing.
_IS_SUPERVISOR = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in os.environ

if not _IS_SUPERVISOR:
    # As the actors do it: the server is named after the environment, too.
    prepare_environment()
    ensure_server()
    # The worker may wait through an upgrade: its actor then imports all of it anew, never half of two versions.
    for _name in [name for name in sys.modules if name.startswith("workers.") and name != __name__]:
        del sys.modules[_name]
