"""Options that many verbs share, and the client they make."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from muonscope.client import Client

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MUONSCOPE_URL",
        help="Address of the service.  [default: what is up on MUONSCOPE_HOME, else http://127.0.0.1:8800]",
        show_default=False,
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        envvar="MUONSCOPE_DATABASE_URL",
        help="By default the SQLite file under MUONSCOPE_HOME.",
        show_default=False,
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `muonscope ls` shows it.")]
SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="A YAML or JSON file; - reads standard input.")]


def open_client(url: str | None) -> "Client":
    from muonscope.client import Client

    return Client(url)
