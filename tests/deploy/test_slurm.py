"""deploy/slurm/muonscope.sbatch against the code, and run as Slurm runs it on an allocation of one node.

`scontrol` is stood in for; the script, the service, Ray and the training are real. The node and the login node are
machines of their own, which share nothing but a folder.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.compose import ROOT
from tests.deploy.words import OURS, THEIRS, unknown_words
from tests.machines import Machine, short_folder, wait_until
from workers.warm_pool import ray_start_environment

SCRIPT: Final = ROOT / "deploy" / "slurm" / "muonscope.sbatch"
LOGIN, NODE = "10.78.0.1", "10.78.0.2"
SPEC: Final = {"name": "from the login node", "world_size": 2, "steps": 12, "precision": "fp32"}
# Of Slurm's and of this script's own.
OTHERS: Final = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "RAY_START_OPTIONS", "TMPDIR"}


def text() -> str:
    return SCRIPT.read_text().replace("\\\n", " ")


def commands(name: str) -> list[list[str]]:
    """The script's uses of a command, without what the shell puts in."""
    lines = re.findall(rf"(?:^|[\s(])({name} [^\n&|]*)", re.sub(r"^#.*$", "", text(), flags=re.MULTILINE), re.MULTILINE)
    return [[word for word in line.split() if not word.startswith('"$')] for line in lines]


def test_the_script_is_bash_that_stops_at_the_first_error() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)

    assert "set -euo pipefail" in text()


def test_every_command_exists_and_has_the_options_that_it_is_given() -> None:
    assert len(commands("muonscope")) == 4
    assert len(commands("ray start")) == 2
    assert len(commands("ray list")) == 1
    for command in (*commands("muonscope"), *commands("ray start"), *commands("ray list")):
        assert unknown_words(command) == set(), command


def test_every_variable_is_one_that_somebody_reads() -> None:
    upper = set(re.findall(r"\b((?:[A-Z]+_)*RAY_\w+|MUONSCOPE_\w+|SLURM_\w+|TMPDIR)\b", text()))

    assert upper - OURS - THEIRS - OTHERS == set()
    assert {f"{name}={value}" for name, value in ray_start_environment().items()} <= set(text().split())


def test_ray_asks_for_a_token_and_no_secret_is_on_a_command_line() -> None:
    assert "RAY_AUTH_MODE=token" in text()
    # Files are named; what is in them is never put into a command.
    assert "$(cat" not in text()
    assert "$(<" not in text()
    # Whoever may not read the home's files learns nothing: they are made under this mask.
    assert "\numask 077\n" in text()


@pytest.mark.parametrize("ends", ["srun", "head"], ids=["a node's", "the head's"])
def test_a_ray_that_does_not_come_up_ends_the_job_instead_of_holding_its_nodes(tmp_path: Path, ends: str) -> None:
    programs = {
        "scontrol": "echo n1; echo n2",
        "getent": "echo 10.0.0.1 STREAM n1",
        "muonscope": "exit 0",
        "srun": "exit 1" if ends == "srun" else "exec sleep 3600",
        "ray": 'case "$*" in *--head*) %s;; list*) echo \'"node_id"\';; esac'
        % ("exit 1" if ends == "head" else "exec sleep 3600"),
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "MUONSCOPE_HOME": str(tmp_path / "home"), "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "n[1-2]", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()

    assert job.returncode == 1, output
    assert "Ray has ended on a node" in output


@pytest.fixture
def allocation() -> Iterator[tuple[Machine, Machine, Path]]:
    """The login node, the node, and the folder that both see."""
    folder = short_folder()
    for name in ("home", "bin", "tmp"):
        (folder / name).mkdir()
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (folder / "bin" / "scontrol").chmod(0o755)
    try:
        with Machine("login", folder / "login") as login, Machine("n1", folder / "n1", {"n1": NODE}) as node:
            login.become_switch(LOGIN)
            node.plug_into(login, NODE)
            yield login, node, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.acceptance
def test_a_run_from_the_login_node_trains_in_the_allocation_and_its_record_outlives_it(
    allocation: tuple[Machine, Machine, Path],
) -> None:
    login, node, folder = allocation
    path = os.pathsep.join([str(Path(sys.executable).parent), str(folder / "bin"), os.environ["PATH"]])
    site = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder), "LANG": "C.UTF-8",
            "MUONSCOPE_HOME": str(folder / "home")}  # fmt: skip
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "TMPDIR": str(folder / "tmp"),
             "RAY_START_OPTIONS": "--num-gpus=2 --object-store-memory=80000000", "DS_ACCELERATOR": "cpu",
             "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
    log = folder / "job.log"
    job = node.start(["bash", str(SCRIPT)], {**site, **slurm}, log)
    found = folder / "home" / "address.json"
    wait_until(lambda: found.exists() or job.poll() is not None, 300, "the service is ready", log.read_text)
    assert job.poll() is None, log.read_text()
    (folder / "spec.json").write_text(json.dumps(SPEC))

    # Nothing is said but the home: address and token are found there.
    said = login.call("muonscope", "run", str(folder / "spec.json"), environment=site, timeout_s=300)

    assert "trains" in said
    assert json.loads(found.read_text()) == {"url": f"http://{NODE}:8800"}
    # Slurm signals the batch script's shell alone.
    shell = int(node.call("pgrep", "--oldest", "--full", "bash .*muonscope.sbatch"))
    node.call("kill", "-TERM", str(shell))
    wait_until(lambda: job.poll() is not None, 180, "the script ends", log.read_text)
    assert job.returncode == 128 + signal.SIGTERM, log.read_text()
    (record,) = (folder / "home" / "records").glob("*.db")
    with closing(sqlite3.connect(record)) as kept:
        assert kept.execute("SELECT name, status FROM run").fetchall() == [("from the login node", "succeeded")]
        assert kept.execute("SELECT count(*) FROM step").fetchone() == (12,)
    assert not list((folder / "tmp").glob("muonscope-7.*"))
