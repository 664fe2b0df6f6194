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


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_second_start_on_a_home_is_told_from_a_port_that_another_program_holds(
    is_ours: bool, command: RunCommand, service: FakeService
) -> None:
    service.answers["GET", "/healthz"] = httpx.Response(200, json={"status": "alive"})
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
    assert (f"{home} is served already at {url}" in second.err) is is_ours
    assert ("give another --port" in second.err) is not is_ours
