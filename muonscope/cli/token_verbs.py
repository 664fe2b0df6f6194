"""Verbs about users' tokens: create, ls, revoke. They work on the service's database itself, whether it runs or not.

There is no request that makes a token: who may make one is who may read the database.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from muonscope.cli.options import DatabaseUrl, Json
from muonscope.cli.screen import Screen
from muonscope.cli.stores import missing_store, open_store, warn_of_another_home
from muonscope.contract.status import TokenScope

if TYPE_CHECKING:
    from service.store.access_models import ApiToken
    from service.store.session import Database

token_app = typer.Typer(no_args_is_help=True, help="Tokens of those who may use the service.")

_SPAN: Final = re.compile(r"([1-9][0-9]{0,4})(d|h)")
_HOURS: Final = {"d": 24, "h": 1}


def add_to(app: typer.Typer) -> None:
    """Register this module's verbs."""
    app.add_typer(token_app, name="token", rich_help_panel="Service")


@token_app.command()
def create(
    name: Annotated[str, typer.Option(help="Who or what will use it; events carry this name.")],
    scope: Annotated[TokenScope, typer.Option(help="read: look. submit: runs as well. admin: everything.")],
    expires: Annotated[
        str | None, typer.Option(help="When it ends: 90d, 12h, or a date such as 2027-01-31. [default: never]")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the token that this file holds; doing so again changes nothing."),
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once: only its hash is kept."""
    from service.store.tokens import TokenRepository

    warn_of_another_home(database_url)
    if from_file is not None:
        if expires is not None:
            raise typer.BadParameter("a token of a file has no end; leave it out", param_hint="--expires")
        _keep(name, scope, from_file, database_url, as_json)
        return
    expires_at = None if expires is None else read_end(expires, datetime.now(UTC))
    with _store(database_url) as database, database.write() as session:
        row, text = TokenRepository(session).create(name, scope, who=_who(), expires_at=expires_at)
        session.flush()
        shown = _shown(row)
    if as_json:
        Screen(as_json).json({**shown, "token": text})
        return
    print(text)
    print("shown once: keep it, as MUONSCOPE_TOKEN or in the file `token` under MUONSCOPE_HOME", file=sys.stderr)


def _keep(name: str, scope: TokenScope, file: Path, database_url: str | None, as_json: bool) -> None:
    from muonscope.errors import MuonscopeError
    from service.store.tokens import TokenRepository

    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MuonscopeError(f"{file} cannot be read: {error}", remedy="give a file that this user may read") from error
    with _store(database_url) as database, database.write() as session:
        row, is_new = TokenRepository(session).keep(name, scope, who=_who(), text=text)
        session.flush()
        shown = _shown(row)
    screen = Screen(as_json)
    if as_json:
        screen.json({**shown, "new": is_new})
    else:
        screen.line(f"{shown['name']} has the token of {file}" + ("" if is_new else ", as before"))


@token_app.command("ls")
def list_tokens(database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """List the tokens there are and were."""
    from service.store.tokens import TokenRepository

    warn_of_another_home(database_url)
    rows, missing = list[dict[str, Any]](), missing_store(database_url)
    if missing is None:
        with _store(database_url) as database, database.read() as session:
            rows = [_shown(row) for row in TokenRepository(session).list()]
    screen = Screen(as_json)
    if as_json:
        screen.json(rows)
        return
    if not rows:
        screen.progress(f"no tokens: {missing}" if missing else "no tokens yet: `muonscope token create` makes one")
        return
    columns = ("name", "scope", "state", "created_by", "created_at", "expires_at", "last_used_at")
    screen.table(columns, [tuple(str(row[column] or "") for column in columns) for row in rows])


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `muonscope token ls` shows it.")],
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Make a token worthless from its next request on, and end the dashboard's sessions that it opened."""
    from muonscope.errors import MuonscopeError
    from service.store.tokens import TokenRepository

    warn_of_another_home(database_url)
    if (missing := missing_store(database_url)) is not None:
        raise MuonscopeError(missing, remedy="set MUONSCOPE_HOME to the folder of the service's state")
    with _store(database_url) as database, database.write() as session:
        shown = _shown(TokenRepository(session).revoke(name, who=_who()))
    if as_json:
        Screen(as_json).json(shown)
    else:
        Screen(as_json).line(f"{shown['name']} is revoked since {shown['revoked_at']}")


def read_end(text: str, now: datetime) -> datetime:
    """Read when a token ends: a span from now, or a date, which is taken as UTC where it says no zone.

    Raises:
        typer.BadParameter: neither.
    """
    span = _SPAN.fullmatch(text.strip())
    if span is not None:
        return now + timedelta(hours=int(span[1]) * _HOURS[span[2]])
    try:
        end = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no span such as 90d or 12h, and no date such as 2027-01-31") from None
    return end if end.tzinfo is not None else end.replace(tzinfo=UTC)


@contextmanager
def _store(database_url: str | None) -> Iterator["Database"]:
    """Open the service's database at this version's schema."""
    from service.store.migrate import upgrade

    with open_store(database_url) as database:
        upgrade(database)
        yield database


def _who() -> str:
    from muonscope.client.settings import own_name

    return own_name() or "cli"


def _shown(row: "ApiToken") -> dict[str, Any]:
    def moment(at: datetime | None) -> str | None:
        return None if at is None else at.astimezone(UTC).isoformat(timespec="seconds")

    is_expired = row.expires_at is not None and row.expires_at <= datetime.now(UTC)
    return {
        "name": row.name,
        "scope": row.scope.value,
        "state": "revoked" if row.revoked_at is not None else "expired" if is_expired else "usable",
        "created_by": row.created_by,
        "created_at": moment(row.created_at),
        "expires_at": moment(row.expires_at),
        "revoked_at": moment(row.revoked_at),
        "last_used_at": moment(row.last_used_at),
    }
