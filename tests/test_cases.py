"""docs/cases.md against the tests: every case has its promise, and every test that it names exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "docs" / "cases.md"
NUMBERS = (
    *("A08", "A09", "A11", "A16"),
    *("B01", "B02", "B04", "B05", "B07", "B10", "B12"),
    *("C01", "C03", "C05", "C08", "C09", "C14", "C16"),
    *("D01", "D03", "D05", "D07", "D09", "D13", "D14", "D17"),
    *("E01", "E03", "E04", "E05", "E07", "E10", "E11", "E14", "E18", "E20"),
)


def test_every_case_has_a_promise_and_a_test() -> None:
    rows = dict(re.findall(r"^\| ([A-E]\d\d) \|(.*)\|$", DOCUMENT.read_text(), re.MULTILINE))

    assert tuple(rows) == NUMBERS
    assert {number for number, row in rows.items() if not re.search(r"`test_\w+`", row)} == set()


def test_every_test_that_is_named_exists_and_every_test_of_a_case_is_named() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT.read_text()))
    there = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }

    assert named - there == set()
    assert {name for name in there if re.match(r"test_[a-e]\d\d_", name)} - named == set()
