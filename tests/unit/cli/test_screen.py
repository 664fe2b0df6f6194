"""Numbers, tables and names as people see them."""

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from muonscope.cli.run_views import duration
from muonscope.cli.screen import Screen, counted, number, plain_table, rich_table, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0, "0"),
        (65536.0, "65536"),
        (True, "yes"),
        (False, "no"),
        (0.43123456, "0.4312"),
        (1e-5, "1e-05"),
        (1e30, "1e+30"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_a_number_is_written_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats())
def test_no_number_reads_as_not_measured(value: float) -> None:
    assert number(value) != number(None)


@given(st.text())
def test_shown_text_is_printable_whatever_it_was(text: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in visible(text))


def test_a_plain_table_is_aligned_and_never_cut() -> None:
    lines = plain_table(("run", "name"), [("r1", "x" * 200), ("run-2", "y")])

    assert lines == ["run    name", "r1     " + "x" * 200, "run-2  y"]


def test_a_plain_table_without_rows_is_its_header() -> None:
    assert plain_table(("a", "b"), []) == ["a  b"]


def in_terminal(columns: list[str], rows: list[list[str]], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(rich_table(columns, rows, width, title="a title"))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


COLUMNS = ["initial scale", "ordering", "outcome", "largest weight motion"]
ROWS = [["65536", "master", "dies at step 17", "0"], ["65536", "ordered", "trains", "8.042"]]


@pytest.mark.parametrize("width", [120, 60, 40, 32, 31, 20, 12])
def test_a_terminals_table_fits_and_loses_no_word(width: int) -> None:
    lines = in_terminal(COLUMNS, ROWS, width)

    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    if width >= 32:
        words = set(" ".join(lines).split())
        assert words >= {word for row in [COLUMNS, *ROWS] for cell in row for word in cell.split()}


def test_a_table_too_narrow_for_its_words_has_its_cells_one_below_the_other() -> None:
    lines = [line.split() for line in in_terminal(COLUMNS, ROWS, 31)]

    assert lines.index(["ordering", "master"]) < lines.index(["ordering", "ordered"])


def test_a_word_of_any_length_is_folded_and_not_cut() -> None:
    name = "x" * 200

    assert "".join("".join(in_terminal(["run", "name"], [["r1", name]], 60)).split()).count("x") == 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (4.25, "4.2 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (7800, "2 h 10 min"),
     (90000, "1 d 1 h")],
)  # fmt: skip
def test_a_duration_has_one_or_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json_is_valid_whatever_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(as_json=True).json([{"name": "ü\x1b", "value": None}])

    assert json.loads(capsys.readouterr().out) == [{"name": "ü\x1b", "value": None}]


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (None, "– steps")])
def test_what_is_counted_is_one_or_many(count: int | None, text: str) -> None:
    assert counted(count, "step") == text
