"""Numbers, tables and names as people see them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonscope.cli.run_views import duration
from muonscope.cli.screen import Screen, number, plain_table, visible


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
