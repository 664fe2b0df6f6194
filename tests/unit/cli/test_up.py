"""What `muonscope up` says when runs can be submitted, and when it cannot listen."""

import json
import os
from pathlib import Path

import httpx
import pytest

from muonscope.cli.up import _announce, _announce_as_json
from service.store.leadership import LeadershipRepository
from service.store.migrate import upgrade
from service.store.session import Database
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import FakeService


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


@pytest.mark.parametrize(
    ("is_ours", "answers", "told"),
    [
        (True, True, "{home} is served already at {url}"),
        (False, True, "a Muonscope whose state is elsewhere answers there"),
        (False, False, "remedy: end the port's holder, or give another --port"),
    ],
    ids=["this home's", "another Muonscope", "another program"],
)
def test_a_start_on_a_port_that_is_taken_says_by_whom(
    is_ours: bool, answers: bool, told: str, command: RunCommand, service: FakeService
) -> None:
    page = httpx.Response(200, text="<html>") if not answers else httpx.Response(200, json={"status": "alive"})
    service.answers["GET", "/healthz"] = page
    url, home = os.environ["MUONSCOPE_URL"], Path(os.environ["MUONSCOPE_HOME"])
    home.mkdir(parents=True)
    database = Database(f"sqlite:///{home / 'muonscope.db'}")
    upgrade(database)
    with database.write() as session:
        controllers = LeadershipRepository(session)
        controllers.register("first", url=url if is_ours else "http://127.0.0.1:9", place="elsewhere|ns|1|1")
        controllers.claim("first", lease_s=3600)
    database.dispose()

    second = command("up", "--port", str(httpx.URL(url).port))

    assert second.code == 1
    assert told.format(home=home, url=url) in second.err
    assert ("give another --port" in second.err) is not is_ours
    assert (f"export MUONSCOPE_URL={url}" in second.err) is (answers and not is_ours)


def test_a_port_that_there_is_not_is_told_by_the_name_of_its_option(command: RunCommand) -> None:
    refused = command("up", "--port", "99999")

    assert refused.code == 2
    assert "--port: 99999 is no port; give 0 to 65535" in refused.err
