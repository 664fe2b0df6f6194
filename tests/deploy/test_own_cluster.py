"""The guide's cluster of one's own, typed as it is printed, and a laptop that knows of it what the guide tells.

Head and laptop are machines of the test's own, each with its network, so that the printed ports are free; HEAD is a
name that both know.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.installation import REPOSITORY
from tests.machines import Machine, refusal, short_folder, wait_until

pytestmark = pytest.mark.acceptance

GUIDE: Final = (REPOSITORY / "docs" / "guides" / "ray-jobs.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```\w*\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
HEAD, LAPTOP = "10.78.0.1", "10.78.0.2"
LIMIT_S: Final = 280.0


def _block(beginning: str) -> str:
    (block,) = (block for block in BLOCKS if block.startswith(beginning))
    return str(block)


@pytest.fixture
def site() -> Iterator[Path]:
    if (reason := refusal()) is not None:
        pytest.skip(reason)
    folder = short_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _machine(name: str, folder: Path) -> tuple[Machine, dict[str, str]]:
    machine = Machine(name, folder / name, {"HEAD": HEAD})
    for home in (machine.folder / "home", machine.folder / "tmp"):
        home.mkdir()
    machine.empty(Path("/dev/shm"))
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(machine.folder / "home"), "TMPDIR": str(machine.folder / "tmp"), "LANG": "C.UTF-8",
        "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "RAY_enable_metrics_collection": "false", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    return machine, environment


def test_a_cluster_of_ones_own_trains_what_a_laptop_submits(site: Path) -> None:
    head, environment = _machine("head", site)
    with head:
        head.become_switch(HEAD)
        # Without a GPU Ray has none to give.
        block = _block("export RAY_AUTH_MODE=token MUONSCOPE_URL")
        logical = block.replace("ray start --head", f"ray start --head --num-gpus=2 --temp-dir={site}/ray")
        assert logical != block
        log = site / "head.log"
        head.start(["bash", "-e", "-c", logical], environment, log)
        wait_until(lambda: "Muonscope is ready at http://HEAD:8800" in log.read_text(), LIMIT_S, "up", log.read_text)

        laptop, own = _machine("laptop", site)
        with laptop:
            laptop.plug_into(head, LAPTOP)
            token = (head.folder / "home" / ".ray" / "auth_token").read_text()
            (laptop.folder / "home" / "spec.yaml").write_text("name: from a laptop\nsteps: 6\n")
            submit = f"cd ~; export RAY_AUTH_MODE=token; {_block('ray job submit --address http://HEAD')}"
            printed = laptop.call(
                "bash", "-e", "-c", submit, environment={**own, "RAY_AUTH_TOKEN": token}, timeout_s=LIMIT_S
            )
            # Counter-test: both doors are closed to whoever brings no token.
            ask = "import httpx; print(*(httpx.get(f'http://HEAD:{port}').status_code for port in "
            closed = laptop.call(sys.executable, "-c", ask + "('8265/api/jobs/', '8800/runs')))", environment=own)

    assert "from a laptop: succeeded; trains" in printed
    assert closed.split() == ["401", "401"]
