"""`muonscope token`, the token that commands send, and a service that would have none to ask for."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer

from muonscope.cli.token_verbs import read_end
from muonscope.client.settings import ClientSettings, request_headers
from tests.unit.cli.conftest import RunCommand

NOW = datetime(2026, 11, 29, tzinfo=UTC)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path))
    monkeypatch.delenv("MUONSCOPE_TOKEN", raising=False)
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


@pytest.mark.parametrize("options", [("--host", "0.0.0.0"), ("--require-token",)])
def test_up_beyond_loopback_without_a_token_says_how_to_make_one(command: RunCommand, options: tuple[str, ...]) -> None:
    result = command("up", "--port", "0", *options)

    assert result.code == 1
    assert "muonscope token create" in result.err
