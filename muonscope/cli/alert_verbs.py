"""Verbs about alerts: create, ls, rm, test, deliveries."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from muonscope.cli.options import Json, Url, open_client
from muonscope.cli.screen import Screen

if TYPE_CHECKING:
    from muonscope.client import Delivery

alert_app = typer.Typer(no_args_is_help=True, help="Alerts: signed messages about runs, posted to a webhook.")

AlertId = Annotated[str, typer.Argument(metavar="ALERT", help="The alert's id, as `muonscope alert ls` shows it.")]
_POLL_S: Final = 0.2
_TEST_S: Final = 30.0


def add_to(app: typer.Typer) -> None:
    """Register this module's verbs."""
    app.add_typer(alert_app, name="alert", rich_help_panel="Service")


@alert_app.command()
def create(
    address: Annotated[str, typer.Argument(metavar="WEBHOOK", help="Where messages are posted: https://…")],
    name: Annotated[str | None, typer.Option(help="Shown in lists and messages. [default: the condition]")] = None,
    verdict: Annotated[list[str] | None, typer.Option(help="A run ends with this verdict; may be repeated.")] = None,
    status: Annotated[list[str] | None, typer.Option(help="A run comes to this status; may be repeated.")] = None,
    discarded_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="More than this share of a run's steps is discarded.")
    ] = None,
    after_steps: Annotated[int, typer.Option(min=1, help="The fewest steps for --discarded-share.")] = 10,
    silence: Annotated[float | None, typer.Option(min=1, help="A running run stores no step for so many s.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Watch runs, and post a signed message when one matches. Prints the signing secret, once."""
    conditions: list[tuple[dict[str, Any], str]] = []
    if verdict:
        conditions.append(({"kind": "verdict", "verdicts": verdict}, f"verdict {' or '.join(verdict)}"))
    if status:
        conditions.append(({"kind": "status", "statuses": status}, f"status {' or '.join(status)}"))
    if discarded_share is not None:
        share = {"kind": "discarded_share", "share": discarded_share, "after_steps": after_steps}
        conditions.append((share, f"more than {discarded_share:g} discarded"))
    if silence is not None:
        conditions.append(({"kind": "silence", "seconds": silence}, f"silent for {silence:g} s"))
    if len(conditions) != 1:
        raise typer.BadParameter("give one of --verdict, --status, --discarded-share and --silence")
    (when, words), screen = conditions[0], Screen(as_json)
    with open_client(url) as client:
        alert = client.alerts.create(name or words, address, when, tag=tag)
    if as_json:
        screen.json(alert)
        return
    screen.line(alert.id)
    screen.progress(f"secret, shown this once: {alert.secret}")


@alert_app.command("ls")
def list_alerts(url: Url = None, as_json: Json = False) -> None:
    """List what is watched."""
    with open_client(url) as client:
        alerts, screen = client.alerts.list(), Screen(as_json)
    if as_json:
        screen.json([alert.model_dump(mode="json", exclude={"secret"}) for alert in alerts])
        return
    rows = [(each.id, each.name, _condition(each.when), each.tag or "", each.url, each.who) for each in alerts]
    screen.table(("alert", "name", "when", "tag", "webhook", "made by"), rows)


@alert_app.command()
def rm(alert_id: AlertId, url: Url = None, as_json: Json = False) -> None:
    """Watch no more; what is not delivered yet is not sent."""
    with open_client(url) as client:
        client.alerts.delete(alert_id)
    screen = Screen(as_json)
    if as_json:
        screen.json({"removed": alert_id})
    else:
        screen.progress(f"{alert_id} is removed")


@alert_app.command("test")
def send_test(alert_id: AlertId, url: Url = None, as_json: Json = False) -> None:
    """Post a message that is about no run, and say how the first attempt went; exits with 1 if it was not taken."""
    with open_client(url) as client:
        sent = client.alerts.test(alert_id)
        deadline = time.monotonic() + _TEST_S
        while sent.attempts == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = [each for each in client.alerts.deliveries(alert_id).items if each.id == sent.id]
            sent = found[0] if found else sent
    _print([sent], as_json)
    if sent.status != "delivered":
        raise typer.Exit(1)


@alert_app.command()
def deliveries(
    alert_id: AlertId,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many, newest first.")] = 50,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List what was sent, and what became of it."""
    with open_client(url) as client:
        page = client.alerts.deliveries(alert_id, limit=limit)
    _print(page.items, as_json)


def _print(sent: "list[Delivery]", as_json: bool) -> None:
    screen = Screen(as_json)
    if as_json:
        screen.json(sent)
        return
    rows = [
        (
            each.id, each.run_id or "", str(each.status), str(each.attempts), str(each.response_code or ""),
            each.next_try_at.isoformat(timespec="seconds") if each.next_try_at else "", each.error or "",
        )
        for each in sent
    ]  # fmt: skip
    screen.table(("message", "run", "status", "attempts", "answer", "next try", "why"), rows)


def _condition(when: dict[str, Any]) -> str:
    match when.get("kind"):
        case "verdict":
            return "verdict " + ", ".join(when["verdicts"])
        case "status":
            return "status " + ", ".join(when["statuses"])
        case "discarded_share":
            return f"more than {when['share']:g} of {when['after_steps']} steps or more discarded"
        case "silence":
            return f"no step for {when['seconds']:g} s"
    return str(when.get("kind"))
