"""The documents against the code: words, commands and links that exist."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from muonscope.cli.main import app
from muonscope.contract import status

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"^```[a-z]*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
ENUMS = (
    status.RunStatus,
    status.AttemptStatus,
    status.FailureKind,
    status.Verdict,
    status.Finding,
    status.StepOrdering,
    status.Implementation,
    status.MomentumUnit,
    status.Precision,
    status.ParameterRoute,
    status.Phase,
    status.QueueMode,
    status.LimitKind,
    status.AlertKind,
    status.DeliveryStatus,
    status.TokenScope,
)


def code_of(document: Path) -> str:
    """Everything in code blocks and code spans."""
    return "\n".join(block or span for block, span in CODE.findall(document.read_text()))


def commands(name: str) -> list[tuple[str, str]]:
    """Every use of a command in a document's code, with the words after it."""
    pattern = re.compile(rf"(?:^|(?<!from)[\s$;&|]){name}((?: +[^\s`#|;&]+)+)", re.MULTILINE)
    return [
        (str(document.relative_to(ROOT)), words.strip())
        for document in DOCUMENTS
        for words in pattern.findall(code_of(document))
    ]


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def verb_tree() -> dict[str, object]:
    def names(command: object) -> object:
        inner = getattr(command, "commands", None)
        return {name: names(each) for name, each in inner.items()} if inner else None

    tree = names(typer.main.get_command(app))
    assert isinstance(tree, dict)
    return tree


def test_documents_are_found_at_all() -> None:
    assert len(DOCUMENTS) >= 10
    assert commands("make")
    assert commands("muonscope")


@pytest.mark.parametrize(("document", "words"), commands("make"))
def test_every_make_command_in_the_documents_exists(document: str, words: str) -> None:
    unquoted = re.sub(r'"[^"]*"', "", words)
    targets = [word for word in unquoted.split() if re.fullmatch(r"[a-z][a-z-]*", word)]

    assert set(targets) <= make_targets(), document


@pytest.mark.parametrize(("document", "words"), commands("muonscope"))
def test_every_muonscope_command_in_the_documents_exists(document: str, words: str) -> None:
    tree: object = verb_tree()
    for word in words.split():
        if not isinstance(tree, dict) or word.startswith("-"):
            break
        assert word in tree, f"{document}: muonscope {words}"
        tree = tree[word]


def test_every_target_is_explained_by_make_itself() -> None:
    printed = subprocess.run(["make", "--silent", "help"], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    explained = {line.split()[0] for line in printed.splitlines()}
    assert make_targets() - {"help"} == explained - {"help"}


@pytest.mark.parametrize("stamp", [".venv/installed", ".venv/installed-dev"])
def test_an_install_says_what_it_downloads_and_shows_how_far_it_is(stamp: str) -> None:
    command = ["make", "--dry-run", "--what-if=pyproject.toml", stamp]
    planned = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert "minutes" in planned
    assert "1.4 GB" in planned
    assert "--progress-bar on" in planned
    assert "--quiet" not in planned


@pytest.mark.parametrize("words", ENUMS, ids=lambda words: words.__name__)
def test_the_glossary_has_every_word_of_the_contract(words: type[status.StrEnum]) -> None:
    glossary = code_of(ROOT / "docs" / "glossary.md").split("\n")

    assert {word.value for word in words} <= set(glossary)


def test_the_glossary_has_every_enum_of_the_contract() -> None:
    kinds = {kind for kind in vars(status).values() if isinstance(kind, type) and issubclass(kind, status.StrEnum)} - {
        status.StrEnum
    }

    assert kinds == set(ENUMS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    # The reference is made when the site is built, which fails on a link that leads nowhere.
    relative = [link for link in links if "://" not in link and not link.startswith(("mailto:", "reference/"))]

    assert [link for link in relative if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_named_in_a_document_exists(document: Path) -> None:
    named = re.findall(
        r"`((?:docs|tests|service|workers|muon_core|muonscope|migrations)/[\w./-]+\.\w+)`", document.read_text()
    )

    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_answers_on_its_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:45]

    assert {"make demo", "make test"} <= {command for line in first_screen for command in re.findall(r"make \w+", line)}
    assert any("dies" in line and "17" in line for line in first_screen)


def test_decisions_are_numbered_in_a_row_and_have_their_four_parts() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    parts = ("## Context", "## Decision", "## Consequences", "## Alternatives")
    assert [path.name for path in decisions if any(part not in path.read_text() for part in parts)] == []


def test_the_site_builds_without_a_warning_and_has_the_reference(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    # MkDocs 1.6 itself is fine; the theme's authors print an opinion about its successor.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=400)

    assert done.returncode == 0, done.stderr
    commands_page = (tmp_path / "reference" / "commands" / "index.html").read_text()
    assert "db backup" in commands_page
    assert "POST /recordings" in (tmp_path / "reference" / "requests" / "index.html").read_text()
    assert "MUONSCOPE_RECORDING_LEASE_S" in (tmp_path / "reference" / "settings" / "index.html").read_text()
    # Nothing is fetched from elsewhere by whoever reads it.
    assert "fonts.googleapis" not in commands_page
