"""Verbs about the installation: doctor, db upgrade, db backup, schema."""

from pathlib import Path
from typing import Annotated

import typer

from muonscope.cli import exit_codes
from muonscope.cli.options import DatabaseUrl, Json, Url
from muonscope.cli.screen import Screen
from muonscope.cli.stores import open_store, store_errors, warn_of_another_home

db_app = typer.Typer(no_args_is_help=True, help="The database: its schema, and copies of it.")


def add_to(app: typer.Typer) -> None:
    """Register this module's verbs."""
    app.command("doctor", rich_help_panel="Service")(doctor)
    app.command("schema", rich_help_panel="Service")(schema)
    app.add_typer(db_app, name="db", rich_help_panel="Service")


def schema(as_json: Json = True) -> None:
    """Print the JSON schema of a spec file, for an editor: name its file as `$schema` in the spec."""
    from muonscope.contract.run_spec import RunSpec

    document = RunSpec.model_json_schema()
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # The file's own word to editors: read by them, and left out of the spec.
    document["properties"]["$schema"] = {"type": "string"}
    Screen(as_json=True).json(document)


def doctor(url: Url = None, as_json: Json = False) -> None:
    """Find what would keep runs from training here, each with its remedy. Ends with 1 if something would."""
    from muonscope.cli.doctor import examine
    from muonscope.cli.findings import Level
    from muonscope.client import ClientSettings
    from service.settings import Settings

    screen = Screen(as_json)
    findings = examine(Settings(), url or ClientSettings().url)
    if as_json:
        screen.json([{"check": f.check, "level": f.level, "found": f.found, "remedy": f.remedy} for f in findings])
    else:
        for finding in findings:
            screen.line(f"{finding.level:<5} {finding.check:<12} {finding.found}")
            if finding.remedy:
                screen.line(f"{'':<18} → {finding.remedy}")
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(exit_codes.FAILURE)


@db_app.command("backup")
def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes: a file that is not there yet.")],
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Copy the database as it is now, also while a service writes to it. PostgreSQL's is what `pg_dump` makes."""
    from service.settings import Settings
    from service.store.backup import back_up

    settings = Settings() if database_url is None else Settings(database_url=database_url)
    warn_of_another_home(database_url)
    with store_errors():
        size = back_up(settings.effective_database_url, target)
    screen = Screen(as_json)
    if as_json:
        screen.json({"file": str(target), "bytes": size})
    else:
        screen.line(f"{target} holds {size} bytes")


@db_app.command("upgrade")
def upgrade(database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Bring the database to the schema this version knows, in one transaction. `muonscope up` does it too."""
    from service.store.migrate import read_revisions
    from service.store.migrate import upgrade as upgrade_schema

    screen = Screen(as_json)
    warn_of_another_home(database_url)
    with open_store(database_url) as database:
        before = read_revisions(database)[0] if database.path is None or database.path.exists() else None
        after = upgrade_schema(database)
    if as_json:
        screen.json({"before": before, "after": after})
    else:
        screen.line(f"the schema is at {after}" + ("" if before == after else f"; it was at {before or 'none'}"))
