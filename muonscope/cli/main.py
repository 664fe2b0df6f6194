"""The `muonscope` command: its verbs, and how errors reach the reader.

Only Typer is imported here and in the verbs' modules; whatever weighs more is imported inside the verb that needs it.
"""

import io
import json
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import typer

from muonscope.cli import alert_verbs, exit_codes, experiment_verbs, queue_verbs, run_verbs, system_verbs, token_verbs
from muonscope.cli.bisect_verb import bisect
from muonscope.cli.import_verb import import_record
from muonscope.cli.screen import visible
from muonscope.cli.up import up

if TYPE_CHECKING:
    from muonscope.errors import MuonscopeError

# A service's remedies name its requests; in a terminal the verbs that make them are meant.
_VERBS: Final = (
    (re.compile(r"GET /runs(?![\w/])"), "`muonscope ls`"),
    (re.compile(r"GET /experiments(?![\w/])"), "`muonscope experiment ls`"),
    (re.compile(r"GET /alerts(?![\w/])"), "`muonscope alert ls`"),
    (re.compile(r"POST /runs/(\w+)/(stop|clone)"), r"`muonscope \2 \1`"),
)

HELP = """See, measure and get rid of Muon step-ordering corruption under DeepSpeed.

Verbs that wait for a run end with 0 when it trains, 3 for another verdict, 1 for a failure, 130 when stopped.
"""

app = typer.Typer(
    name="muonscope",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up", rich_help_panel="Service")(up)
run_verbs.add_to(app)
experiment_verbs.add_to(app)
app.command("bisect", rich_help_panel="Experiments")(bisect)
app.command("import", rich_help_panel="Runs")(import_record)
queue_verbs.add_to(app)
alert_verbs.add_to(app)
token_verbs.add_to(app)
system_verbs.add_to(app)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and end.", is_eager=True),
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        print(f"muonscope {installed_version('muonscope')}")
        raise typer.Exit


def main() -> None:
    """Run the command line of this process and end it with the verb's exit code.

    Typer itself ends a misused command with 2, Ctrl-C with 130, and a closed pipe without a word.
    """
    from muonscope.errors import MuonscopeError

    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where the locale is older than Unicode: a name is told by its escapes, and not by a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="muonscope")
    except MuonscopeError as error:
        _print_error(error, as_json="--json" in sys.argv)
        sys.exit(exit_codes.FAILURE)
    except OSError as error:
        # One that names a file is about what the user has named; any other is a mistake of ours.
        if error.filename is None:
            raise
        unusable = MuonscopeError(
            f"{error.filename}: {error.strerror}", remedy="name another file, or make room for it"
        )
        _print_error(unusable, as_json="--json" in sys.argv)
        sys.exit(exit_codes.FAILURE)
    except ValueError as error:
        # Pydantic's is one; importing it for every verb would cost more than this look.
        if getattr(error, "title", None) not in ("Settings", "ClientSettings"):
            raise
        _print_error(_unusable_setting(error), as_json="--json" in sys.argv)
        sys.exit(exit_codes.FAILURE)


def _unusable_setting(error: Any) -> "MuonscopeError":
    """Say which variable of the environment is at fault."""
    from muonscope.errors import MuonscopeError

    found = [f"{'_'.join(('MUONSCOPE', *map(str, each['loc']))).upper()}: {each['msg']}" for each in error.errors()]
    return MuonscopeError("; ".join(found).replace("MUONSCOPE: ", ""), remedy="docs/guides/settings.md lists them all")


def _print_error(error: "MuonscopeError", *, as_json: bool) -> None:
    """Say what happened and what to try, on standard error."""
    field, value = getattr(error, "field", None), getattr(error, "value", None)
    if as_json:
        document = {"error": type(error).__name__, "detail": str(error), "remedy": error.remedy}
        document |= {"status": getattr(error, "status", None), "field": field, "value": value}
        document["errors"] = (getattr(error, "problem", None) or {}).get("errors") or None
        print(json.dumps({key: item for key, item in document.items() if item is not None}), file=sys.stderr)
        return
    print(f"muonscope: {visible(str(error))}", file=sys.stderr)
    if field:
        print(f"  field:  {visible(str(field))}", file=sys.stderr)
    if field and value is not None:
        print(f"  value:  {visible(json.dumps(value, ensure_ascii=False))[:200]}", file=sys.stderr)
    if error.remedy:
        print(f"  remedy: {visible(_by_verbs(error.remedy))}", file=sys.stderr)
    for other in (getattr(error, "problem", None) or {}).get("errors", [])[1:]:
        remedy = f"; {_by_verbs(other['remedy'])}" if other.get("remedy") else ""
        print(f"  also:   {visible(str(other.get('detail')) + remedy)}", file=sys.stderr)


def _by_verbs(remedy: str) -> str:
    for request, verb in _VERBS:
        remedy = request.sub(verb, remedy)
    return remedy


if __name__ == "__main__":
    main()
