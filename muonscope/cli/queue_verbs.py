"""Verbs about the queue: show, pause, resume, drain, limit."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from muonscope.cli.options import Json, Url, open_client
from muonscope.cli.screen import Screen

if TYPE_CHECKING:
    from muonscope.client import Client

queue_app = typer.Typer(no_args_is_help=True, help="The queue: whether runs start, and who may hold how many GPUs.")

Why = Annotated[str, typer.Option(help="Shown to everyone who waits.")]
_POLL_S: Final = 0.5


def add_to(app: typer.Typer) -> None:
    """Register this module's verbs."""
    app.add_typer(queue_app, name="queue", rich_help_panel="Service")


@queue_app.command()
def show(url: Url = None, as_json: Json = False) -> None:
    """Show whether runs start, how many wait, and the limits."""
    with open_client(url) as client:
        _print(client.queue(), as_json)


@queue_app.command()
def pause(why: Why = "", url: Url = None, as_json: Json = False) -> None:
    """Start nothing more; submissions are taken, live runs go on."""
    with open_client(url) as client:
        _print(client.set_queue_mode("pause", why=why), as_json)


@queue_app.command()
def resume(why: Why = "", url: Url = None, as_json: Json = False) -> None:
    """Start runs again."""
    with open_client(url) as client:
        _print(client.set_queue_mode("resume", why=why), as_json)


@queue_app.command()
def drain(
    why: Why = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return once no run holds a GPU any more.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Start nothing more and take no submissions; live runs go on to their end."""
    with open_client(url) as client:
        state = client.set_queue_mode("drain", why=why)
        while wait and state["mode"] == "draining" and not state["is_drained"]:
            time.sleep(_POLL_S)
            state = client.queue()
        _print(state, as_json)


@queue_app.command()
def limit(
    user: Annotated[str | None, typer.Option(help="A user; * is each one without a limit of their own.")] = None,
    tag: Annotated[str | None, typer.Option(help="A tag; * is each one without a limit of its own.")] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help="The most GPUs held at once.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the limit away.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a user's or a tag's runs hold at most so many GPUs at once."""
    if (user is None) == (tag is None) or (gpus is None) != remove:
        raise typer.BadParameter("give --user or --tag, and --gpus or --remove")
    with open_client(url) as client:
        _print(_limited(client, user, tag, gpus), as_json)


def _limited(client: "Client", user: str | None, tag: str | None, gpus: float | None) -> dict[str, Any]:
    if user is not None:
        return client.set_queue_limit("user", user, gpus)
    return client.set_queue_limit("tag", tag or "", gpus)


def _print(state: dict[str, Any], as_json: bool) -> None:
    screen = Screen(as_json)
    if as_json:
        screen.json(state)
        return
    since = "" if state["mode"] == "open" else f", by {state['who']}" + (f": {state['why']}" if state["why"] else "")
    drained = " (drained)" if state["is_drained"] else ""
    screen.line(f"{state['mode']}{drained}{since}; {state['waiting']} waiting, {state['holding']} holding GPUs")
    if state["limits"]:
        rows = [(each["kind"], each["name"], f"{each['max_gpus']:g}", each["who"]) for each in state["limits"]]
        screen.table(("limit", "of", "gpus", "set by"), rows)
