"""Verbs about runs: submit, run, ls, show, watch, compare, logs, stop, retry, clone, tag, export."""

import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from muonscope.cli import exit_codes
from muonscope.cli.interrupts import held_interrupts, sigterm_interrupts
from muonscope.cli.options import Json, RunId, SpecPath, Url, open_client
from muonscope.cli.screen import Screen, counted

if TYPE_CHECKING:
    from muonscope.client import Client, Run, Step

_PANEL = "Runs"


# What a run takes to end: its job is asked first, and killed after some seconds.
_STOP_WAIT_S: Final = 20.0


def add_to(app: typer.Typer) -> None:
    """Register this module's verbs."""
    verbs = (submit, run, ls, show, watch, compare, logs, stop, retry, clone, tag, export)
    for verb in verbs:
        app.command(verb.__name__, rich_help_panel=_PANEL)(verb)


def submit(
    spec: SpecPath,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the service would take it.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Queue a run and print its id."""
    from muonscope.cli.ray_jobs import with_working_dir
    from muonscope.cli.spec_files import read_spec

    screen = Screen(as_json)
    with open_client(url) as client:
        wanted = with_working_dir(read_spec(spec, screen.progress))
        if check:
            valid = client.runs.validate(wanted)
            if as_json:
                screen.json(valid)
            else:
                screen.line(f"would be accepted, fingerprint {valid['fingerprint']}")
            return
        with held_interrupts() as release:
            queued = client.runs.submit(wanted)
            _print_queued(queued, screen)
            release()


def _print_queued(queued: "Run", screen: Screen) -> None:
    if screen.as_json:
        screen.json(queued)
        return
    screen.line(queued.id)
    screen.progress(f"{queued.name} is {queued.status}; follow it with `muonscope watch {queued.id}`")


def run(
    spec: SpecPath,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Train without a service, into a record file for `muonscope import`.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="The record file of --standalone.  [default: muonscope-record.db here]", show_default=False),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Queue a run, follow it to its end, and exit by its verdict. Ctrl-C stops the run."""
    from muonscope.cli.ray_jobs import own_task, with_working_dir
    from muonscope.cli.spec_files import read_spec, refuse_invalid

    if record is not None and not standalone:
        raise typer.BadParameter("it is the file of --standalone; give that too", param_hint="--record")
    screen = Screen(as_json)
    wanted = read_spec(spec, screen.progress)
    file = (record or Path("muonscope-record.db")).absolute() if standalone else None
    opened: AbstractContextManager[Client]
    if file is None:
        wanted, opened = with_working_dir(wanted), open_client(url)
    else:
        from muonscope.cli.service_process import standalone_service

        # Its service would say so too, once its Ray is up.
        refuse_invalid(wanted)
        opened = standalone_service(file, screen, task=own_task(wanted))
    # Around the service's start as well: ended in the midst of it, the command would leave it and its Ray behind.
    with sigterm_interrupts(), opened as client, held_interrupts() as release:
        queued = client.runs.submit(wanted)
        # Whoever reads it in a job's log asks for the run by its id.
        screen.progress(f"run {queued.id}")
        told = nullcontext() if file is None else _record_told(file, screen)
        with told, _stopped_on_interrupt(client, queued):
            release()
            _follow(client, queued, screen)


@contextmanager
def _record_told(file: Path, screen: Screen) -> Iterator[None]:
    try:
        yield
    finally:
        # Whatever the verdict is.
        command = f"muonscope import {shlex.quote(str(file))}"
        screen.progress(f"the record is in {file}: `{command}` brings it to a service, under another id")


def ls(
    query: Annotated[str | None, typer.Argument(metavar="[QUERY]", help="Only runs that match.")] = None,
    sort: Annotated[str | None, typer.Option(help="Field to sort by; a leading - turns it round.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most this many.")] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from itertools import islice

    from muonscope.cli.run_views import RUN_COLUMNS, run_row

    screen = Screen(as_json)
    with open_client(url) as client:
        runs = list(islice(client.runs.list(query, sort=sort), limit))
    if as_json:
        screen.json(runs)
    elif runs:
        screen.table(RUN_COLUMNS, [run_row(each) for each in runs])
    else:
        screen.progress("no runs" + (f" match {query!r}" if query else " yet: `muonscope submit SPEC` queues one"))


def show(
    run_id: RunId,
    steps: Annotated[int, typer.Option("--steps", min=0, help="How many of the last steps to show.")] = 5,
    with_parameters: Annotated[
        bool, typer.Option("--parameters", help="Every parameter, the optimizer that takes it, and why.")
    ] = False,
    with_ranks: Annotated[
        bool, typer.Option("--ranks", help="Each rank of the newest attempt and its device.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show one run: its verdict and evidence, attempts with the time of each phase, last steps.

    With --json the ranks are in each attempt, and the parameters under `parameters` where they are asked for.
    """
    from muonscope.cli import run_views

    screen = Screen(as_json)
    with open_client(url) as client:
        shown = client.runs.get(run_id)
        recorded = shown.summary.steps or 0
        last = [] if as_json or not steps else list(client.runs.steps(run_id, start=max(0, recorded - steps)))
        parameters = client.runs.parameters(run_id) if with_parameters else ()
    if as_json:
        listed = {"parameters": [each.model_dump(mode="json") for each in parameters]} if with_parameters else {}
        screen.json({**shown.model_dump(mode="json"), **listed})
        return
    facts = run_views.run_facts(shown)
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        screen.line(f"{name.ljust(width)}  {text}")
    tables = (
        (run_views.ATTEMPT_COLUMNS, run_views.attempt_rows(shown)),
        (run_views.RANK_COLUMNS, run_views.rank_rows(shown) if with_ranks else []),
        (run_views.PARAMETER_COLUMNS, run_views.parameter_rows(parameters)),
        run_views.step_table(shown, last),
    )
    for columns, rows in tables:
        if rows:
            screen.line()
            screen.table(columns, rows)
        if rows and columns is run_views.ATTEMPT_COLUMNS:
            for line in run_views.phase_lines(shown):
                screen.line(line)


def watch(run_id: RunId, url: Url = None, as_json: Json = False) -> None:
    """Follow a run to its end and exit by its verdict. Ctrl-C stops watching, not the run."""
    with open_client(url) as client:
        found = client.runs.get(run_id)
        try:
            _follow(client, found, Screen(as_json))
        except KeyboardInterrupt:
            print(f"\n{found.id} goes on; `muonscope stop {found.id}` stops it", file=sys.stderr)
            raise typer.Exit(exit_codes.STOPPED) from None


def compare(
    run_a: Annotated[str, typer.Argument(metavar="A", help="A run's id.")],
    run_b: Annotated[str, typer.Argument(metavar="B", help="Another run's id.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Compare two runs: what differs in their specs, and where their records part."""
    from muonscope.cli.compare_views import answer_lines, figure_rows, run_heads, spec_rows

    screen = Screen(as_json)
    with open_client(url) as client:
        comparison = client.compare(run_a, run_b)
    if as_json:
        screen.json(comparison)
        return
    for line in answer_lines(comparison):
        screen.line(line)
    screen.line()
    screen.table(("spec", *run_heads(comparison)), spec_rows(comparison))
    screen.line()
    screen.table(("record", *run_heads(comparison)), figure_rows(comparison))


def logs(
    run_id: RunId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is finished.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="One rank's alone.  [default: all]", show_default=False)
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print what the run's processes wrote. As JSON: one object a piece, which is all of it unless followed."""
    from muonscope.cli.growing_logs import new_text

    with open_client(url) as client:
        printed = ""
        while True:
            # The state first: a log read after the end is whole.
            is_last = not follow or client.runs.get(run_id).is_finished
            text = client.runs.logs(run_id, rank=rank)
            new = new_text(printed, text)
            if not text and is_last and not as_json:
                print(f"nothing was written; `muonscope show {run_id}` says how the run went", file=sys.stderr)
            if as_json and (new or is_last):
                print(json.dumps({"run_id": run_id, "rank": rank, "text": new}))
            elif new:
                sys.stdout.write(new)
            sys.stdout.flush()
            printed = text
            if is_last:
                return
            time.sleep(1.0)


def stop(run_id: RunId, url: Url = None, as_json: Json = False) -> None:
    """Stop a run; its GPUs are free a moment later."""
    screen = Screen(as_json)
    with open_client(url) as client:
        stopping = client.runs.stop(run_id)
    if as_json:
        screen.json(stopping)
    else:
        screen.line(f"{stopping.id} is {'stopped' if stopping.is_finished else 'stopping'}")


def retry(run_id: RunId, url: Url = None, as_json: Json = False) -> None:
    """Give a failed or stopped run another attempt."""
    screen = Screen(as_json)
    with open_client(url) as client:
        retried = client.runs.retry(run_id)
    if as_json:
        screen.json(retried)
    else:
        screen.line(f"{retried.id} is {retried.status}")


def clone(run_id: RunId, url: Url = None, as_json: Json = False) -> None:
    """Queue a run's spec again, as a new run, and print its id."""
    screen = Screen(as_json)
    with open_client(url) as client:
        queued = client.runs.clone(run_id)
    _print_queued(queued, screen)


def tag(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="The runs' ids.")],
    add: Annotated[
        list[str] | None, typer.Option("--add", "-a", metavar="TAG", help="Put on; may be repeated.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", "-r", metavar="TAG", help="Take off; may be repeated.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Put tags on runs and take tags off them, waiting, live or ended."""
    if not add and not remove:
        raise typer.BadParameter("give a tag to --add or to --remove", param_hint="--add / --remove")
    screen = Screen(as_json)
    with open_client(url) as client:
        changed = [client.runs.tag(run_id, add=add or (), remove=remove or ()) for run_id in runs]
    if as_json:
        screen.json(changed)
        return
    for each in changed:
        screen.line(f"{each.id} carries {', '.join(each.tags) or 'no tags'}")


def export(
    run_id: RunId,
    form: Annotated[str, typer.Option("--format", help="csv, or jsonl: one JSON object a line.")] = "csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; by default standard output.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write every recorded step, exact; NaN and the infinities by name, not measured as nothing.

    As JSON: the steps as jsonl, or where a file takes them, what was written to it.
    """
    if as_json and output is None:
        form = "jsonl"
    if form not in ("csv", "jsonl"):
        raise typer.BadParameter(f"{form!r} is not csv or jsonl", param_hint="--format")
    with open_client(url) as client:
        # Asked first: for a run that there is not, no file is made or emptied.
        client.runs.get(run_id)
        pieces = client.runs.csv(run_id) if form == "csv" else _json_lines(client.runs.steps(run_id))
        with nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8", newline="") as file:
            # The CSV's heading is no step.
            written = -1 if form == "csv" else 0
            for piece in pieces:
                file.write(piece)
                written += piece.count("\n")
    if output is not None and as_json:
        Screen(as_json).json({"run_id": run_id, "steps": written, "format": form, "file": str(output)})
    elif output is not None:
        Screen().progress(f"{counted(written, 'step')} written to {output}")


def _json_lines(steps: Iterator["Step"]) -> Iterator[str]:
    for step in steps:
        yield json.dumps(step.model_dump(mode="json")) + "\n"


@contextmanager
def _stopped_on_interrupt(client: "Client", run: "Run") -> Iterator[None]:
    """Stop the run when this process is told to end, and say when it has: told so again, it ends at once."""
    from muonscope.errors import Conflict

    try:
        yield
    except KeyboardInterrupt:
        try:
            client.runs.stop(run.id)
        except Conflict as ended:
            print(f"\n{ended}", file=sys.stderr)
            raise typer.Exit(exit_codes.STOPPED) from None
        print(f"\nstopping {run.id}", file=sys.stderr)
        _await_end(client, run.id)
        raise typer.Exit(exit_codes.STOPPED) from None


def _await_end(client: "Client", run_id: str) -> None:
    deadline = time.monotonic() + _STOP_WAIT_S
    while not (latest := client.runs.get(run_id)).is_finished:
        if time.monotonic() > deadline:
            print(f"{run_id} is still stopping; `muonscope watch {run_id}` says when it has ended", file=sys.stderr)
            return
        time.sleep(0.2)
    print(f"{run_id} is {latest.status}", file=sys.stderr)


def _follow(client: "Client", run: "Run", screen: Screen) -> None:
    """Show a run's progress to its end, print its outcome, and exit by it."""
    from muonscope.cli.progress import follow_runs
    from muonscope.cli.run_views import last_frames, outcome_line

    finished = run
    # What it failed of is the outcome's to say.
    with follow_runs([run], screen, tells_faults=False) as progress:
        for finished in client.runs.watch(run.id):
            progress.update([finished])
    if screen.as_json:
        screen.json(finished)
    else:
        screen.line(outcome_line(finished))
        for line in last_frames(finished):
            screen.progress(line)
    raise typer.Exit(exit_codes.exit_code(finished))
