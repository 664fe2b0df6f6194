"""`muonscope run` as a shell sees it, against a service and alone: 0 trains, 3 another verdict, 1 failure, 130 stopped.

Everything is real: the command is a process of its own, Ray and training included.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.installation import ENDED, REPOSITORY, STEADY, Installation, processes_with
from tests.integration.service.shell import Shell

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

FROZEN = "tests.faults.tasks:frozen"
SHORT: dict[str, Any] = {"name": "short", "world_size": 2, "steps": 6, **STEADY}
# From the greatest scale with nothing but overflow, the scale is at its end after 17 steps.
DYING: dict[str, Any] = {"name": "dying", "world_size": 1, "steps": 30, "step_ordering": "master",
                         "optimizer": {"lr": 0.05}}  # fmt: skip
NOTHING_TO_TRAIN: dict[str, Any] = {"name": "frozen", "world_size": 1, "steps": 6, "task": {"name": FROZEN}}
LONG: dict[str, Any] = {**SHORT, "name": "long", "steps": 1_000_000}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("home"), settings={"allow_tasks": FROZEN}) as one:
        yield one


@pytest.fixture
def shell(installation: Installation, tmp_path: Path) -> Shell:
    return Shell(tmp_path, {"MUONSCOPE_URL": installation.url})


@pytest.fixture
def alone(tmp_path: Path) -> Shell:
    """A shell that knows of no service."""
    return Shell(tmp_path, {"MUONSCOPE_HOME": str(tmp_path / "nobody"), "MUONSCOPE_ALLOW_TASKS": FROZEN})


def the_run(installation: Installation, name: str) -> dict[str, Any]:
    listed = installation.client.get("/runs", params={"limit": 1000}).json()["runs"]
    (run_id,) = (run["id"] for run in listed if run["name"] == name)
    return installation.run(run_id)


def test_a_run_that_trains_ends_the_command_with_0(installation: Installation, shell: Shell) -> None:
    code, printed = shell.run("run", "spec.json", spec=SHORT)

    assert (code, the_run(installation, "short")["verdict"]["name"]) == (0, "trains"), printed
    assert "trains" in printed


def test_another_verdict_ends_it_with_3(installation: Installation, shell: Shell) -> None:
    code, printed = shell.run("run", "spec.json", spec=DYING)

    assert (code, the_run(installation, "dying")["verdict"]["name"]) == (3, "dies"), printed
    assert "dies" in printed


def test_a09_a_frozen_model_ends_the_command_with_1_and_the_reason_and_is_tried_once(
    installation: Installation, shell: Shell
) -> None:
    code, printed = shell.run("run", "spec.json", spec=NOTHING_TO_TRAIN)

    run = the_run(installation, "frozen")
    assert code == 1, printed
    assert (run["status"], run["failure"]["kind"], len(run["attempts"])) == ("failed", "config_refused", 1)
    assert "no trainable parameter" in run["failure"]["message"]
    assert "config_refused" in printed
    assert "no trainable parameter" in printed
    shown = shell.run("show", run["id"])
    assert "no trainable parameter" in shown[1]


def test_ctrl_c_stops_the_run_and_ends_it_with_130(installation: Installation, shell: Shell) -> None:
    code, printed = shell.interrupt_once_it_trains("run", "spec.json", spec=LONG)

    run = the_run(installation, "long")
    run = installation.wait_for(run["id"], *ENDED)
    assert (code, run["status"]) == (130, "stopped"), printed


def test_alone_it_trains_into_a_file_that_a_service_takes_in_later_and_once(
    installation: Installation, alone: Shell, tmp_path: Path
) -> None:
    spec = {**SHORT, "name": "alone"}
    code, printed = alone.run("run", "--standalone", "spec.json", "--record", "record.db", spec=spec)
    assert code == 0, printed
    assert "trains" in printed
    other, died = alone.run(
        "run", "--standalone", "spec.json", "--record", "record.db", spec={**DYING, "name": "alone2"}
    )
    assert other == 3, died
    assert f"muonscope import {tmp_path / 'record.db'}" in died.splitlines()[-1]

    here = Shell(tmp_path, {"MUONSCOPE_URL": installation.url})
    first, said = here.run("import", "record.db")
    again, repeated = here.run("import", "record.db")

    assert (first, again) == (0, 0), said
    run = the_run(installation, "alone")
    old_id = re.findall(r"^run (\w+)$", printed, re.MULTILINE)[0]
    assert f"{old_id} is run {run['id']} here: 6 steps of alone" in said
    assert f"{old_id} is run {run['id']} already here" in repeated
    assert (run["status"], run["verdict"]["name"]) == ("succeeded", "trains")
    assert installation.steps(run["id"]) == list(range(6))
    assert the_run(installation, "alone2")["verdict"]["name"] == "dies"
    # The service that it was, its Ray and its folder are gone.
    assert not (tmp_path / "nobody").exists()


def test_alone_the_guides_task_of_ones_own_is_found_in_the_folder_and_needs_no_leave(
    tmp_path: Path, alone: Shell
) -> None:
    guide = (REPOSITORY / "docs" / "guides" / "ray-jobs.md").read_text(encoding="utf-8")
    for name, block in (("laptop_task.py", "python"), ("spec.yaml", "yaml")):
        (text,) = re.findall(rf"```{block}\n(.*?)```", guide, re.DOTALL)
        (tmp_path / name).write_text(text, encoding="utf-8")

    code, printed = alone.run("run", "--standalone", "spec.yaml")

    assert code == 0, printed
    assert "my own task: succeeded; trains" in printed


def test_alone_a_failure_is_1_and_ctrl_c_is_130(alone: Shell, tmp_path: Path) -> None:
    failed, why = alone.run("run", "--standalone", "spec.json", spec=NOTHING_TO_TRAIN)
    others = set(processes_with("workers.driver"))
    stopped, printed = alone.interrupt_once_it_trains("run", "--standalone", "spec.json", spec=LONG)

    assert failed == 1, why
    assert "config_refused" in why
    assert "no trainable parameter" in why
    assert stopped == 130, printed
    assert set(processes_with("workers.driver")) - others == set()
    with closing(sqlite3.connect(tmp_path / "muonscope-record.db")) as record:
        assert record.execute("SELECT status FROM run WHERE name = 'long'").fetchall() == [("stopped",)]
