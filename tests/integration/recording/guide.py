"""The scripts of docs/guides/your-own-script.md as they are printed, and the runs that they leave."""

import re
import time
from pathlib import Path
from typing import Any

import httpx

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "your-own-script.md"
# In the guide's order; its text says each one's name.
NAMES = ("train.py", "recorded.py", "trainer.py", "accelerated.py")


def guide_script(name: str) -> str:
    """The text of one of the guide's scripts."""
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"`(\w+\.py)`(?:(?!```).)*?```python\n(.*?)```", text, re.DOTALL)
    assert tuple(found for found, _ in blocks) == NAMES
    return dict(blocks)[name]


def ended(service: httpx.Client, run_id: str) -> dict[str, Any]:
    """The run, once its record is closed."""
    deadline = time.monotonic() + 120
    while (run := service.get(f"/runs/{run_id}").json())["finished_at"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return dict(run)
