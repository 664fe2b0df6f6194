"""What `muonscope up` says when runs can be submitted."""

import json

import pytest

from muonscope.cli.up import _announce, _announce_as_json


def test_at_the_usual_address_nothing_needs_to_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    _announce("http://127.0.0.1:8800")

    assert capsys.readouterr().out == (
        "Muonscope is ready at http://127.0.0.1:8800 (dashboard: http://127.0.0.1:8800/ui/)\n"
    )


def test_at_another_address_the_variable_that_names_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _announce("http://127.0.0.1:8801")

    assert capsys.readouterr().out.splitlines()[1].endswith("export MUONSCOPE_URL=http://127.0.0.1:8801")


def test_as_json_the_addresses_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _announce_as_json("http://127.0.0.1:8801")

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"url": "http://127.0.0.1:8801", "dashboard": "http://127.0.0.1:8801/ui/"}
