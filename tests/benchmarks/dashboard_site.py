"""The service over a store that is there already, in a process of its own, so that it takes no time of the test's.

    python -m tests.benchmarks.dashboard_site HOME

Prints its address and serves until its standard input is closed. No cluster: nothing starts.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving


@contextmanager
def site(home: Path) -> Iterator[str]:
    """Serve the store in this folder for the block; give the address."""
    command = [sys.executable, "-m", "tests.benchmarks.dashboard_site", str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "the service did not start"
            yield address
        finally:
            process.stdin.close()


def main() -> None:
    launcher = FakeLauncher(gpus=2.0)
    launcher.is_reachable = False
    with serving(Path(sys.argv[1]), launcher, wait_until_ready=False) as client:
        print(str(client.base_url).rstrip("/"), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
