"""The same work given to Muonscope and to other trackers, in one run: make bench-trackers.

    python -m tests.benchmarks.trackers.yardstick --trackers-python PATH [--only NAME,...] [--scale FRACTION]

    scalars   one run of 10 scalars a step: steps a second until they are durable, bytes a scalar on disk
    norms     the same with 200 norms a step
    kill      a writer of 500 steps/s is killed after 4 s (SIGKILL), alone and with its whole process tree:
              how many steps whose recording had returned cannot be read afterwards

Each tracker runs in a process of its own, under its own interpreter; `--worker` is that process. A write ends after
`CAP_S`; its rate counts the steps done. What cannot keep up therefore has fewer steps, not a better rate.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
CAP_S = 20.0
KILL_HZ = 500.0
KILL_AFTER_S = 4.0
SCALARS = (
    "loss_scale_before", "loss_scale_after", "loss", "lr", "grad_norm", "update_norm", "momentum_norm", "step_time_s",
    "nonfinite_parameters", "ns_calls",
)  # fmt: skip
WORKLOADS = {"scalars": (20_000, 0), "norms": (2_000, 200)}
NAMES = ("muonscope", "trackio", "mlflow_batch", "wandb_offline")


def values_of(count: int, num_norms: int) -> list[dict[str, float]]:
    """Draw the values of some steps; a longer run repeats them."""
    draw = random.Random(0)
    names = SCALARS if not num_norms else [f"momentum_norm/layers.{index}.weight" for index in range(num_norms)]
    counted = ("nonfinite_parameters", "ns_calls")
    return [
        {name: float(draw.randrange(100)) if name in counted else draw.random() for name in names}
        for _ in range(min(count, 512))
    ]


# -- in the tracker's process ----------------------------------------------------------------------------------------


def write(tracker: Any, steps: int, num_norms: int) -> dict[str, Any]:
    """Log steps and make them durable; return the rate and what a call took."""
    values, taken, done = values_of(steps, num_norms), [], 0
    tracker.open()
    begun, spent = time.perf_counter(), time.process_time()
    for step in range(steps):
        call = time.perf_counter_ns()
        tracker.log(step, values[step % len(values)])
        taken.append(time.perf_counter_ns() - call)
        done += 1
        if step % 16 == 0 and time.perf_counter() - begun > CAP_S:
            break
    tracker.close()
    elapsed = time.perf_counter() - begun
    ordered = sorted(taken)
    return {
        "steps": done,
        "steps_per_s": done / elapsed,
        "log_p50_us": ordered[done // 2] / 1e3,
        "log_p99_us": ordered[done * 99 // 100] / 1e3,
        "writer_cpu_us": (time.process_time() - spent) / done * 1e6,
    }


def write_until_killed(tracker: Any, acknowledged: Path) -> None:
    """Log at a steady pace, leaving after each call how many have returned."""
    values = values_of(512, 0)
    tracker.open()
    with acknowledged.open("r+b") as file:
        count = mmap.mmap(file.fileno(), 8)
    following = time.perf_counter()
    for step in range(1_000_000):
        tracker.log(step, values[step % len(values)])
        count[:8] = struct.pack("q", step + 1)
        following += 1 / KILL_HZ
        time.sleep(max(0.0, following - time.perf_counter()))


def run_worker(name: str, verb: str, folder: Path, arguments: dict[str, Any]) -> None:
    from trackers import TRACKERS

    tracker = TRACKERS[name](folder)
    try:
        if verb == "kill":
            write_until_killed(tracker, Path(arguments["acknowledged"]))
        result = {"count": tracker.count()} if verb == "count" else write(tracker, **arguments)
    finally:
        tracker.shutdown()
    print("\n@@ " + json.dumps(result), flush=True)
    # Some trackers' threads would hold the process for a while.
    os._exit(0)


# -- in the caller's process -----------------------------------------------------------------------------------------


class Yardstick:
    def __init__(self, base: Path, python: dict[str, str]) -> None:
        self._base, self._python = base, python

    def spawn(self, name: str, verb: str, folder: Path, arguments: dict[str, Any]) -> "subprocess.Popen[str]":
        command = [self._python[name], str(HERE / "yardstick.py"), "--worker", name, verb, str(folder), "-"]
        command[-1] = json.dumps(arguments)
        environment = {**os.environ, "PYTHONPATH": f"{HERE}:{REPOSITORY}" if name == "muonscope" else str(HERE)}
        with (self._base / f"{name}.log").open("a") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)

    def call(self, name: str, verb: str, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
        out, _ = self.spawn(name, verb, folder, arguments).communicate(timeout=600)
        for line in reversed(out.splitlines()):
            if line.startswith("@@ "):
                answer: dict[str, Any] = json.loads(line[3:])
                return answer
        raise RuntimeError(f"{name} {verb} failed; see {self._base / name}.log")

    def folder(self, *parts: str) -> Path:
        folder = self._base / "-".join(parts)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def measure_write(self, name: str, workload: str, scale: float) -> dict[str, Any]:
        steps, num_norms = WORKLOADS[workload]
        folder = self.folder(name, workload)
        result = self.call(name, "write", folder, {"steps": int(steps * scale), "num_norms": num_norms})
        result["bytes_per_scalar"] = size_of(folder) / result["steps"] / (num_norms or len(SCALARS))
        return result

    def measure_kill(self, name: str, is_tree: bool) -> dict[str, Any]:
        folder = self.folder(name, "kill", "tree" if is_tree else "process")
        acknowledged = self._base / f"{folder.name}.acknowledged"
        acknowledged.write_bytes(bytes(8))

        def count() -> int:
            return int(struct.unpack("q", acknowledged.read_bytes())[0])

        writer = self.spawn(name, "kill", folder, {"acknowledged": str(acknowledged)})
        deadline = time.monotonic() + 300
        while not count():
            assert writer.poll() is None, f"{name} ended"
            assert time.monotonic() < deadline, f"{name} did not begin"
            time.sleep(0.02)
        time.sleep(KILL_AFTER_S)
        children = descendants(writer.pid)
        for pid in [writer.pid, *(children if is_tree else ())]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        writer.communicate()
        time.sleep(2.0)
        result = self.call(name, "count", folder, {})
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return {"returned": count(), "lost": count() - result["count"]}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, those that were left to init included only while their parent lives."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, metavar=("NAME", "VERB", "FOLDER", "JSON"), help=argparse.SUPPRESS)
    parser.add_argument("--trackers-python", default=str(REPOSITORY / ".venv-trackers" / "bin" / "python"))
    parser.add_argument("--only", default=",".join(NAMES), help="trackers, with commas between")
    parser.add_argument("--workloads", default="scalars,norms,kill")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the steps, for a busy machine")
    options = parser.parse_args()
    if options.worker:
        name, verb, folder, text = options.worker
        run_worker(name, verb, Path(folder), json.loads(text))
        return
    base = Path(tempfile.mkdtemp(prefix="muonscope-trackers-"))
    names, workloads = options.only.split(","), options.workloads.split(",")
    yardstick = Yardstick(
        base, {name: sys.executable if name == "muonscope" else options.trackers_python for name in NAMES}
    )
    try:
        for workload in workloads:
            results = {name: _measured(yardstick, name, workload, options.scale) for name in names}
            _print(workload, results)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _measured(yardstick: Yardstick, name: str, workload: str, scale: float) -> dict[str, Any]:
    if workload != "kill":
        return yardstick.measure_write(name, workload, scale)
    alone, tree = (yardstick.measure_kill(name, is_tree) for is_tree in (False, True))
    return {
        "returned": alone["returned"],
        "lost": alone["lost"],
        "returned_tree": tree["returned"],
        "lost_tree": tree["lost"],
    }


def _print(workload: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{workload}, load average {os.getloadavg()[0]:.1f}")
    ours = results.get("muonscope", {}).get("steps_per_s")
    for name, result in results.items():
        cells = [
            f"{key} {value:,.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
        ]
        ratio = f"; muonscope is {ours / result['steps_per_s']:.1f}x" if ours and name != "muonscope" else ""
        print(f"  {name:14} {', '.join(cells)}{ratio}", flush=True)


if __name__ == "__main__":
    main()
