"""docs/reliability.md against the tests: every fault has its promise and its test, and no fault test is unnamed."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "reliability.md"
SECURITY = DOCUMENT.with_name("security.md")
NUMBERS = [f"F{number}" for number in range(1, 20)] + [f"S{number}" for number in range(1, 13)]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows() -> dict[str, str]:
    """Each fault's row of the document's tables."""
    return dict(re.findall(r"^\| ([FS]\d+) \|(.*)\|$", DOCUMENT.read_text(), re.MULTILINE))


def test_every_fault_has_a_promise_and_a_test_that_carries_its_number() -> None:
    found = rows()

    assert list(found) == NUMBERS
    for number, row in found.items():
        assert re.search(rf"`test_(?:[fs]\d+_)*{number.lower()}_", row), f"{number} names no test of its own"


def test_every_test_that_is_named_exists_and_every_fault_test_is_named() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT.read_text() + SECURITY.read_text()))
    everywhere = {name for path in TESTS.rglob("test_*.py") for name in names_in(path)}

    assert named - everywhere == set()
    assert {name for name in everywhere if re.match(r"test_[fs]\d+_", name)} - named == set()
