"""The command itself: quick, complete, and polite about misuse."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import TRAINED, FakeService, problem, run_json

RUN_VERBS = ("submit", "run", "ls", "show", "watch", "compare", "logs", "stop", "retry", "clone", "tag", "export")
VERBS = ("up", *RUN_VERBS, "experiment", "doctor", "db")


def test_help_lists_every_verb(command: RunCommand) -> None:
    result = command("--help")

    assert result.code == 0
    assert [verb for verb in VERBS if f" {verb} " not in result.out] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, command: RunCommand) -> None:
    result = command(verb, "--help")

    assert result.code == 0
    assert "Usage: muonscope" in result.out


@pytest.mark.parametrize("arguments", [["nonsense"], ["show"], ["ls", "--limit", "many"], ["ls", "-n", "0"]])
def test_misuse_ends_with_two_and_a_usage_line(arguments: list[str], command: RunCommand) -> None:
    result = command(*arguments)

    assert result.code == 2
    assert "Usage:" in result.err


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("list them with GET /runs", "list them with `muonscope ls`"),
        ("list them with GET /experiments", "list them with `muonscope experiment ls`"),
        ("stop it first: POST /runs/r1/stop", "stop it first: `muonscope stop r1`"),
        ("POST /runs/r1/clone runs it again", "`muonscope clone r1` runs it again"),
        ("GET /runs/r1/artifacts lists them", "GET /runs/r1/artifacts lists them"),
    ],
)
def test_a_remedy_names_the_verb_in_a_terminal_and_the_request_in_json(
    said: str, shown: str, command: RunCommand, service: FakeService
) -> None:
    service.answers["GET", "/runs/nosuchrun"] = problem(404, "not found", detail="there is no run", remedy=said)

    assert command("show", "nosuchrun").err.splitlines()[-1] == f"  remedy: {shown}"
    assert json.loads(command("show", "nosuchrun", "--json").err)["remedy"] == said


def test_the_version_is_the_installed_one(command: RunCommand) -> None:
    assert command("--version").out.startswith("muonscope 0.")


def test_the_commands_modules_load_nothing_heavy() -> None:
    heavy = ["torch", "deepspeed", "ray", "sqlalchemy", "fastapi", "httpx", "yaml", "numpy", "rich.live"]
    program = f"import sys, muonscope.cli.main; print([name for name in {heavy!r} if name in sys.modules])"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert loaded.stdout.strip() == "[]"


def test_help_comes_within_its_budget() -> None:
    """0.4 s on an idle machine: held as processor time, the best of several tries, with room for a busy one."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "muonscope.cli.main", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert min(times) < 0.7


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(
    command: RunCommand, service: FakeService, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text("name: first")
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)

    exported = command("export", "r1", "-o", "/proc/none/steps.csv")
    recorded = command("run", str(tmp_path / "spec.yaml"), "--standalone", "--record", "/proc/none/mine.db", "--json")

    assert (exported.code, recorded.code) == (1, 1)
    assert exported.err.startswith("muonscope: /proc/none/steps.csv: No such file or directory\n  remedy: ")
    assert json.loads(recorded.err)["detail"] == "/proc/none: No such file or directory"


def test_a_terminal_older_than_unicode_gets_escapes_and_whole_json(service: FakeService) -> None:
    service.answers["GET", "/runs"] = {"runs": [run_json(name="caf\xe9 \u2192")], "next_cursor": None}
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}

    plain, as_json = (
        subprocess.run(
            [sys.executable, "-m", "muonscope.cli.main", "ls", *words], env=environment, capture_output=True, check=True
        ).stdout
        for words in ([], ["--json"])
    )

    assert b"caf\xe9 \\u2192" in plain
    assert json.loads(as_json)[0]["name"] == "caf\xe9 \u2192"
