"""`muonscope token`, the token that commands send, and a service that would have none to ask for."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer

from muonscope.cli.token_verbs import read_end
from muonscope.client.settings import ClientSettings, request_headers
from tests.unit.cli.conftest import RunCommand, Start

NOW = datetime(2026, 11, 29, tzinfo=UTC)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path))
    # At the usual address another test's service may answer, or the machine's own; here is none.
    monkeypatch.setenv("MUONSCOPE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("MUONSCOPE_TOKEN", raising=False)
    # No service that happens to run on this machine: its home would be told of.
    monkeypatch.setenv("MUONSCOPE_URL", "http://127.0.0.1:9")
    return tmp_path


def test_a_token_is_made_listed_and_revoked_and_printed_once(command: RunCommand) -> None:
    made = command("token", "create", "--name", "ann", "--scope", "submit", "--expires", "90d")
    again = command("token", "create", "--name", "ann", "--scope", "read")
    listed = command("token", "ls", "--json")
    revoked = command("token", "revoke", "ann")
    unknown = command("token", "revoke", "bob")

    assert made.out.startswith("msc_")
    assert len(made.out.splitlines()) == 1
    assert (again.code, again.out) == (1, "")
    (row,) = json.loads(listed.out)
    assert (row["name"], row["scope"], row["state"]) == ("ann", "submit", "usable")
    assert made.out.strip() not in listed.out
    assert revoked.code == 0
    assert json.loads(command("token", "ls", "--json").out)[0]["state"] == "revoked"
    assert (unknown.code, "muonscope token ls" in unknown.err) == (1, True)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("90d", NOW + timedelta(days=90)),
        ("12h", NOW + timedelta(hours=12)),
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
    ],
)
def test_a_tokens_end_is_a_span_or_a_date(text: str, end: datetime) -> None:
    assert read_end(text, NOW) == end


@pytest.mark.parametrize("text", ["", "soon", "0d", "-3d", "90", "2027-13-01"])
def test_an_end_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="90d"):
        read_end(text, NOW)


def test_commands_send_the_token_of_the_environment_else_of_the_homes_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Authorization" not in request_headers(ClientSettings(), None)
    (home / "token").write_text("msc_kept\n")
    assert request_headers(ClientSettings(), None)["Authorization"] == "Bearer msc_kept"
    monkeypatch.setenv("MUONSCOPE_TOKEN", "msc_said")
    assert request_headers(ClientSettings(), None)["Authorization"] == "Bearer msc_said"
    assert request_headers(ClientSettings(), "msc_given")["Authorization"] == "Bearer msc_given"


def test_the_token_of_a_named_file_is_sent_and_a_file_that_gives_none_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: RunCommand
) -> None:
    (home / "token").write_text("msc_kept")
    named = home / "mounted"
    monkeypatch.setenv("MUONSCOPE_TOKEN_FILE", str(named))
    missing = command("ls")
    named.write_text("\n")
    empty = command("ls")
    named.write_text("msc_mounted\n")

    assert (missing.code, str(named) in missing.err) == (1, True)
    assert (empty.code, "it is empty" in empty.err) == (1, True)
    assert request_headers(ClientSettings(), None)["Authorization"] == "Bearer msc_mounted"


def test_a_token_of_a_file_is_made_once_and_opens_what_its_scope_says(command: RunCommand, home: Path) -> None:
    file = home / "secret"
    file.write_text(f"msc_{'7a' * 32}\n")
    create = ("token", "create", "--name", "admin", "--from-file", str(file), "--scope")
    first = command(*create, "admin")
    again = command(*create, "admin")
    other_scope = command(*create, "read")
    other_name = command("token", "create", "--name", "bob", "--scope", "admin", "--from-file", str(file))
    command("token", "revoke", "admin")
    revoked = command(*create, "admin")

    assert (first.code, again.code, "as before" in again.out) == (0, 0, True)
    assert [row["name"] for row in json.loads(command("token", "ls", "--json").out)] == ["admin"]
    assert (other_scope.code, other_name.code, revoked.code) == (1, 1, 1)
    assert "7a7a" not in "".join(each.out + each.err for each in (first, again, other_scope, other_name, revoked))


@pytest.mark.parametrize("text", ["", "secret", "msc_short", "7a" * 32, f"msc_{'7a' * 32} x"])
def test_a_file_that_holds_no_token_is_refused_without_repeating_it(command: RunCommand, home: Path, text: str) -> None:
    file = home / "secret"
    file.write_text(text)
    refused = command("token", "create", "--name", "admin", "--scope", "admin", "--from-file", str(file))

    assert (refused.code, "openssl rand -hex 32" in refused.err) == (1, True)
    assert len(text) < 10 or text not in refused.err


def test_a_token_of_a_file_cannot_be_given_an_end(command: RunCommand, home: Path) -> None:
    create = ("token", "create", "--name", "admin", "--scope", "admin", "--from-file", str(home / "secret"))

    assert command(*create, "--expires", "90d").code == 2


@pytest.mark.parametrize("verb", [("db", "upgrade"), ("token", "ls"), ("doctor",)])
def test_a_setting_that_no_verb_can_use_is_named(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MUONSCOPE_PORT", "eighty")
    result = command(*verb)

    assert result.code == 1
    assert "MUONSCOPE_PORT" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("options", [("--host", "0.0.0.0"), ("--require-token",)])
def test_up_beyond_loopback_without_a_token_says_how_to_make_one(command: RunCommand, options: tuple[str, ...]) -> None:
    result = command("up", "--port", "0", *options)

    assert result.code == 1
    assert "muonscope token create" in result.err


def test_a_listing_makes_no_store_and_says_where_it_looked(command: RunCommand, home: Path) -> None:
    listed, revoked = command("token", "ls"), command("token", "revoke", "ann")
    as_json = command("token", "ls", "--json")

    assert (listed.code, listed.out) == (0, "")
    assert listed.err.startswith(f"no tokens: there is no store in {home} yet")
    assert (as_json.code, json.loads(as_json.out)) == (0, [])
    assert (revoked.code, f"there is no store in {home} yet" in revoked.err) == (1, True)
    assert list(home.iterdir()) == []
    # Counter-test: a store is listed, and one without tokens says that it has none.
    database = f"sqlite:///{home}/other.db"
    command("token", "create", "--name", "ann", "--scope", "read")
    command("token", "create", "--name", "bob", "--scope", "read", "--database-url", database)
    assert "ann" in command("token", "ls").out
    assert "bob" in command("token", "ls", "--database-url", database).out


def test_a_store_without_tokens_says_so(command: RunCommand, home: Path) -> None:
    from service.store.migrate import upgrade
    from service.store.session import Database

    database = Database(f"sqlite:///{home}/muonscope.db")
    upgrade(database)
    database.dispose()

    listed = command("token", "ls")

    assert (listed.code, listed.out, listed.err) == (0, "", "no tokens yet: `muonscope token create` makes one\n")


def test_a_token_or_a_copy_of_another_store_than_the_running_services_is_warned_of(
    command: RunCommand, start: Start, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUONSCOPE_URL", start("/bin/muonscope", "up", home="served", cwd=tmp_path))

    listed, made = command("token", "ls"), command("token", "create", "--name", "ann", "--scope", "read")
    kept, upgraded = command("db", "backup", str(tmp_path / "copy.db")), command("db", "upgrade")
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path / "served"))
    # Counter-test: of the service's own there is nothing to say.
    own = command("token", "create", "--name", "ann", "--scope", "read")

    for told in (listed, made, kept, upgraded):
        (warning,) = (line for line in told.err.splitlines() if line.startswith("note: "))
        assert f"keeps its state in {tmp_path}/served, not in {home}" in warning
        assert f"export MUONSCOPE_HOME={tmp_path}/served" in warning
    assert (made.code, made.out.startswith("msc_")) == (0, True)
    assert "note:" not in own.err
