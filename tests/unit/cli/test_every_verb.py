"""What holds for every verb, found by walking them: JSON on request, help, and completion."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import jsonschema
import pytest
import typer

from muonscope.cli.main import app
from tests.unit.cli.conftest import RunCommand


def verbs() -> Iterator[tuple[str, click.Command]]:
    def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(path), command
        for name, each in (inner or {}).items():
            yield from walk(each, (*path, name))

    return walk(typer.main.get_command(app), ())


VERBS = dict(verbs())
# What these wait for takes longer: they have tests of their own.
LONG = {"up", "run", "experiment run", "bisect"}
DOCS = Path(__file__).parents[3] / "docs"


def guide_lines(document: str) -> list[str]:
    """The commands of a document's first block of them, without `muonscope` and without what is said of each."""
    text = (DOCS / document).read_text(encoding="utf-8")
    block = text[text.index("```\nmuonscope ") :].split("```")[1]
    return [re.split(r" {2,}", line)[0].removeprefix("muonscope ") for line in block.strip().splitlines()]


def test_the_walk_finds_verbs_and_verbs_of_groups() -> None:
    assert {"up", "run", "logs", "export", "import", "db backup", "experiment run", "queue limit"} <= VERBS.keys()


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_prints_json_on_request(name: str) -> None:
    assert "--json" in [option for parameter in VERBS[name].params for option in parameter.opts]


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_says_what_it_does(name: str) -> None:
    assert (VERBS[name].help or "").strip().endswith((".", ")"))


def test_the_shell_completes_verbs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from muonscope.cli.main import main; main()"],
        env={**os.environ, "_MUONSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "muonscope exp", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.split() == ["export", "experiment"]


def test_the_schema_is_that_of_spec_files(command: RunCommand) -> None:
    schema = json.loads(command("schema").out)

    validator = jsonschema.Draft202012Validator(schema)
    validator.validate({"$schema": "./spec.schema.json", "name": "mine", "zero_stage": 2})
    # Counter-test: one that takes everything would be of no use to an editor.
    assert not validator.is_valid({"zero_stage": 4})
    assert not validator.is_valid({"surprise": 1})
