"""`muonscope up`: the service in the foreground."""

import json
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from muonscope.cli import exit_codes
from muonscope.cli.options import Json
from muonscope.errors import ServiceStartFailed

if TYPE_CHECKING:
    from service.settings import Settings

_LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(message)s"
_QUIET: Final = ("httpx", "httpcore", "alembic", "uvicorn.error", "asyncio")

Host = Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [default: 8800]", show_default=False)]
Gpus = Annotated[
    int | None,
    typer.Option(
        help="GPUs of the local Ray. [default: the real ones, else 4 logical ones]", min=0, max=4096, show_default=False
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="sqlite:///… or postgresql://… [default: a file under MUONSCOPE_HOME]", show_default=False),
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="Dashboard URL of a Ray cluster. [default: start a local Ray]", show_default=False),
]

RequireToken = Annotated[
    bool | None,
    typer.Option(
        "--require-token",
        help="Ask for tokens on loopback too, as behind a reverse proxy. Beyond loopback they always are.",
        show_default=False,
    ),
]
Drain = Annotated[
    bool,
    typer.Option("--drain", help="When told to end, let live runs end first; a second signal ends at once."),
]


def up(
    host: Host = None,
    port: Port = None,
    gpus: Gpus = None,
    database_url: DatabaseUrl = None,
    ray_address: RayAddress = None,
    require_token: RequireToken = None,
    drain: Drain = False,
    as_json: Json = False,
) -> int:
    """Run the service in the foreground until Ctrl-C; its address is printed when runs can be submitted.

    What is not given is taken from MUONSCOPE_… in the environment.
    """
    if port is not None and not 0 <= port <= 65535:
        raise typer.BadParameter(f"{port} is no port; give 0 to 65535", param_hint="--port")
    given = {"host": host, "port": port, "gpus": gpus, "database_url": database_url, "ray_address": ray_address}
    given |= {"require_token": require_token}
    announce = _announce_as_json if as_json else _announce
    code = _up({name: value for name, value in given.items() if value is not None}, announce, drain=drain)
    if code != 0:
        raise typer.Exit(code)
    return code


def _up(given: dict[str, Any], announce: Callable[[str], None], *, drain: bool) -> int:
    from service.settings import Settings

    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, stream=sys.stderr, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = Settings(**given)
    print(f"starting on {settings.host}:{settings.port}, state in {settings.home}", file=sys.stderr, flush=True)
    # FastAPI and SQLAlchemy take a second to import: not before the settings are known to be good.
    from muonscope.cli.stores import store_errors
    from service.serve import AddressInUse, NoToken, serve

    try:
        with store_errors():
            return exit_codes.TRAINS if serve(settings, on_ready=announce, drain=drain) == 0 else exit_codes.FAILURE
    except NoToken as error:
        make_one = "make one with `muonscope token create --name NAME --scope admin`"
        raise ServiceStartFailed(str(error), remedy=make_one) from error
    except AddressInUse as error:
        raise _address_in_use(error, settings) from error


def _address_in_use(error: OSError, settings: "Settings") -> ServiceStartFailed:
    """Tell whoever starts the service a second time from one whose port another program holds."""
    from muonscope.cli.service_process import answers, find_answering_leader

    reason, url = str(error.strerror), settings.effective_advertise_url
    if find_answering_leader(settings) == url:
        reason = f"{reason}; {settings.home} is served already at {url}"
        return ServiceStartFailed(reason, remedy="use that service as it is, or end it before you start it anew")
    if answers(url):
        return ServiceStartFailed(
            f"{reason}; a Muonscope whose state is elsewhere answers there",
            remedy=f"use that one (export MUONSCOPE_URL={url}), end it, or give another --port",
        )
    return ServiceStartFailed(reason, remedy="end the port's holder, or give another --port")


def _announce_as_json(address: str) -> None:
    print(json.dumps({"url": address, "dashboard": f"{address}/ui/"}), flush=True)


def _announce(address: str) -> None:
    from muonscope.client.settings import DEFAULT_URL

    print(f"Muonscope is ready at {address} (dashboard: {address}/ui/)", flush=True)
    if address != DEFAULT_URL:
        print(f"for the commands in another shell: export MUONSCOPE_URL={address}", flush=True)
