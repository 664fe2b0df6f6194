"""Backward and step under ZeRO on two GPUs: ours, DeepSpeed's own Muon, and AdamW as the floor. `make bench-gpu`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.benchmark, pytest.mark.multi_gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_step(stage: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    out = Path(os.environ.get("MUON_BENCH_FILE", tmp_path / "rows.jsonl"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    rows = tmp_path / "stage.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.zero_ranks", "--port", str(port), "--stages", str(stage)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank), "--out", str(rows)], cwd=ROOT) for rank in range(2)]
    try:
        assert [rank.wait(timeout=800) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in measured)
    ours = [row for row in measured if row["kind"] == "ours"]
    assert ours
    for row in ours:
        # At stages 1 and 2 only what straddles a cut travels, there and back.
        straddling = 2 * 4 * 1024 * 1024
        assert row["elements_sent"] <= (row["limit"] if stage == 3 else straddling)
