"""A database that is no use is an error of one line and a remedy to every verb that opens it, `up` among them."""

import json
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from service.settings import Settings
from service.store.migrate import upgrade
from service.store.session import Database
from tests.unit.cli.conftest import RunCommand

VERBS = (("db", "upgrade"), ("token", "ls"), ("up", "--port", "0"))
BAD = {
    "damaged": "file is not a database",
    "nowhere": "cannot be made",
    "away": "Connection refused",
    "newer": "start the newer Muonscope",
    "foreign": "neither sqlite:///path nor postgresql://",
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stores")
    (folder / "damaged.db").write_text("this was never a database")
    database = Database(f"sqlite:///{folder / 'newer.db'}")
    upgrade(database)
    database.dispose()
    with closing(sqlite3.connect(folder / "newer.db")) as newer:
        newer.execute("UPDATE alembic_version SET version_num = 'ffff'")
        newer.commit()
    return {
        "damaged": f"sqlite:///{folder / 'damaged.db'}",
        "nowhere": f"sqlite:///{folder / 'damaged.db' / 'under a file' / 'x.db'}",
        "away": "postgresql://nobody@127.0.0.1:9/none",
        "newer": f"sqlite:///{folder / 'newer.db'}",
        "foreign": "mysql://ann:secret@127.0.0.1/none",
    }


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("kind", BAD)
def test_a_database_that_is_no_use_is_told_in_a_line(
    verb: tuple[str, ...], kind: str, urls: dict[str, str], command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUONSCOPE_DATABASE_URL", urls[kind])

    plain, as_json = command(*verb), command(*verb, "--json")

    assert plain.code == as_json.code == 1
    assert BAD[kind] in plain.err
    assert "Traceback" not in plain.err
    assert "secret" not in plain.err
    (said,) = (line for line in as_json.err.splitlines() if line.startswith("{"))
    assert BAD[kind] in json.loads(said)["detail"]


def test_up_on_a_port_that_is_taken_says_so_before_it_touches_the_database(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUONSCOPE_DATABASE_URL", f"sqlite:///{tmp_path / 'muonscope.db'}")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = command("up", "--port", str(holder.getsockname()[1]))

    assert taken.code == 1
    assert "cannot listen on" in taken.err
    assert "--port" in taken.err
    assert not (tmp_path / "muonscope.db").exists()


@pytest.mark.parametrize(
    "url", ["", "sqlite:////tmp/x.db", "postgresql://muon@db/muonscope", "postgres://db/muonscope"]
)
def test_a_store_that_there_can_be_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUONSCOPE_DATABASE_URL", url)

    assert Settings().database_url == url
