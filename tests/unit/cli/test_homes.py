"""Whose state a command looks at, and whose the service keeps that answers."""

import json
from pathlib import Path

from muonscope.cli.findings import Level
from muonscope.cli.homes import check_home, home_served_at
from tests.unit.cli.conftest import Start


def test_a_service_on_another_home_is_told_with_what_to_set(start: Start, tmp_path: Path) -> None:
    url = start("/bin/muonscope", "up", home=".muonscope", cwd=tmp_path)
    # Left by a service that was killed and had the address before.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "address.json").write_text(json.dumps({"url": url}))

    finding = check_home(mine, url, is_up=True)

    assert finding.level is Level.NOTE
    assert str(mine) in finding.found
    assert url in finding.found
    assert finding.remedy == f"to look at the service's: export MUONSCOPE_HOME={tmp_path}/.muonscope"
    assert check_home(tmp_path / ".muonscope", url, is_up=True).level is Level.OK


def test_a_service_that_was_told_no_home_has_the_usual_one(start: Start, tmp_path: Path) -> None:
    assert home_served_at(start("/bin/muonscope", "up", home=None, cwd=tmp_path)) == Path.home() / ".muonscope"


def test_what_only_brings_to_a_service_has_no_home_and_the_left_address_tells(start: Start, tmp_path: Path) -> None:
    url = start("tunnel", home="/its/own", cwd=tmp_path)
    before = check_home(tmp_path, url, is_up=True)
    (tmp_path / "address.json").write_text(json.dumps({"url": url}))

    assert before.level is Level.NOTE
    assert "set MUONSCOPE_HOME" in before.remedy
    assert check_home(tmp_path, url, is_up=True).level is Level.OK


def test_where_no_service_answers_or_one_elsewhere_no_process_is_looked_for(tmp_path: Path) -> None:
    assert check_home(tmp_path, "http://127.0.0.1:9", is_up=False).level is Level.OK
    assert home_served_at("https://muonscope.example") is None
