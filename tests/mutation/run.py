"""Plant each fault into a copy of muon_core, run its killers, and print who killed what.

    python tests/mutation/run.py [--slice 1/4] [--match TEXT] [--results FILE] [--docs docs/mutants.md]

Exit code 0 when every mutant of the slice was killed. torch and DeepSpeed are imported once; each mutant runs in a
fork of this process, and so do its ranks. With `--results` slices add up, and what the file says is killed is not run
again; `--docs` writes the table once all are in.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NEEDED = (
    "tests/conftest.py",
    "tests/examples.py",
    "tests/distributed",
    "tests/unit/muon_core",
    "tests/golden",
    "pyproject.toml",
)
LIMIT_S = 150
# pytest's own exit codes: all passed, and some failed. Any other says that the killers did not run.
PASSED, FAILED = 0, 1


def main() -> int:
    # Ended from outside, it still ends the tests that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = _arguments()
    part, parts = (int(number) for number in arguments.slice.split("/"))
    chosen = [mutant for position, mutant in enumerate(MUTANTS) if position % parts == part - 1]
    results = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    chosen = [mutant for mutant in chosen if arguments.match in f"{mutant.file}: {mutant.fault}"]
    chosen = [mutant for mutant in chosen if results.get(mutant.fault) != "killed"]
    _import_once()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workspace = _workspace(Path(folder))
        killers = sorted({killer for mutant in chosen for killer in mutant.killers})
        if killers and (code := _run(workspace, killers, limit_s=LIMIT_S * 4)) != PASSED:
            print(f"the tests do not pass without a mutant (exit code {code}):\n{_log(workspace)}", file=sys.stderr)
            return 2
        for mutant in chosen:
            started = time.monotonic()
            results[mutant.fault] = verdict = _verdict(workspace, mutant)
            print(f"{verdict:9} {time.monotonic() - started:5.1f} s  {mutant.file}: {mutant.fault}", flush=True)
            if arguments.results:
                arguments.results.write_text(json.dumps(results, indent=1))
    if arguments.docs and len(results) == len(MUTANTS):
        arguments.docs.write_text(_document(results))
    alive = [mutant.fault for mutant in chosen if results[mutant.fault] != "killed"]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed" + "".join(f"\nALIVE: {each}" for each in alive))
    return bool(alive)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the planted faults.")
    parser.add_argument("--slice", default="1/1", help="which part of how many, as 2/4")
    parser.add_argument("--match", default="", help="only mutants whose file or fault contains this")
    parser.add_argument("--results", type=Path, help="a JSON file in which slices add up")
    parser.add_argument("--docs", type=Path, help="where to write the table once every mutant has run")
    return parser.parse_args()


def _import_once() -> None:
    os.environ.update({"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"})
    os.environ["MUON_CORE_TEST_START_METHOD"] = "fork"
    # A mutated file may be as old and as long as the one before it: no bytecode is kept.
    sys.dont_write_bytecode = True
    for name in ("deepspeed", "pytest", "safetensors.torch"):
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def _workspace(folder: Path) -> Path:
    for name in NEEDED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    shutil.copytree(ROOT / "muon_core", folder / "muon_core", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _verdict(workspace: Path, mutant: Mutant) -> str:
    path = workspace / "muon_core" / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return "misplaced"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        code = _run(workspace, mutant.killers, limit_s=LIMIT_S)
    finally:
        path.write_text(original)
    return {FAILED: "killed", PASSED: "ALIVE"}.get(code, f"error {code}")


def _run(workspace: Path, tests: list[str] | tuple[str, ...], *, limit_s: float) -> int:
    """Run tests in a fork, in a process group of its own, and return pytest's exit code; a hang is -1."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _become_pytest(workspace, tests)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return -1
    finally:
        # Ranks outlive a test process that ended hard.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _become_pytest(workspace: Path, tests: list[str] | tuple[str, ...]) -> None:
    code = 70
    try:
        log = os.open(workspace / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(workspace)
        sys.path.insert(0, str(workspace))
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _log(workspace: Path) -> str:
    return (workspace / "log.txt").read_text()[-3000:]


def _document(results: dict[str, str]) -> str:
    lines = [
        "# Mutants",
        "",
        "Faults planted into a copy of `muon_core`, one at a time, and the test that kills each. `make mutants` runs",
        f"them all and writes this table: {sum(v == 'killed' for v in results.values())} of {len(MUTANTS)} are killed.",
        f"Last on {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {version('torch')}, DeepSpeed",
        f"{version('deepspeed')}, CPU.",
        "",
        "| fault | in `muon_core` | | by |",
        "|---|---|---|---|",
    ]
    for mutant in MUTANTS:
        killers = ", ".join(killer.split("::")[1].split("[")[0] for killer in mutant.killers)
        lines.append(f"| {mutant.fault} | `{mutant.file}` | {results[mutant.fault]} | {killers} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
