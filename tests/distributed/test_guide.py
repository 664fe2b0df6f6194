"""The guide's script for people with a training loop of their own, run as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "your-own-script.md"


def test_the_guides_script_discards_trains_and_learns(tmp_path: Path) -> None:
    script, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(script, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", str(path)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": found, "DEEPSPEED_LOG_LEVEL": "error"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    steps = re.findall(r"step (\d+): loss ([\d.]+), scale (\d+), discarded (True|False)", done.stdout)
    assert steps, done.stdout[-2000:]
    losses = [float(loss) for _, loss, _, discarded in steps if discarded == "False"]
    assert any(discarded == "True" for *_, discarded in steps)
    assert losses[-1] < losses[0] / 2
