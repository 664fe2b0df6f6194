"""Verbs about experiments: run, show, ls."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muonscope.cli import exit_codes
from muonscope.cli.interrupts import held_interrupts, sigterm_interrupts
from muonscope.cli.options import Json, Url, open_client
from muonscope.cli.screen import Screen

if TYPE_CHECKING:
    from muonscope.client import Client, Experiment

experiment_app = typer.Typer(no_args_is_help=True, help="Questions, each answered by several runs.")

ExperimentId = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Its id, as `muonscope experiment ls` shows.")]


def add_to(app: typer.Typer) -> None:
    """Register this module's verbs."""
    app.add_typer(experiment_app, name="experiment", rich_help_panel="Experiments")


@experiment_app.command("run")
def run(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A built-in experiment: thirty-step, byte-gpt, calm-boom, mixed-overflow, gradient-accumulation, "
            "scale-change, dtype-assertion, or published-tables for all that have published figures. Or a YAML or "
            "JSON file with the name, the base and the matrix of your own; - reads standard input.",
        ),
    ],
    text: Annotated[
        str | None, typer.Option(metavar="PATH", help="For byte-gpt: train on this file or folder of your own.")
    ] = None,
    gpus_per_rank: Annotated[
        float | None, typer.Option(metavar="SHARE", help="0.5 puts two ranks on one GPU; by default each has its own.")
    ] = None,
    deepspeed: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Run under this DeepSpeed release, unmodified.")
    ] = None,
    keep_serving: Annotated[
        bool, typer.Option("--keep-serving", help="Leave the service up afterwards, until Ctrl-C.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Run an experiment, a built-in one or your own, and print its table.

    Uses the service at MUONSCOPE_URL; where none is named and none answers, starts one and ends it afterwards.
    Ends with 0 only when every run shows what is known of it, or trains where nothing is.
    """
    from muonscope.cli.service_process import service_for

    screen = Screen(as_json)
    given = {
        "text": None if text is None else str(Path(text).absolute()),
        "gpus_per_rank": gpus_per_rank,
        "deepspeed": deepspeed,
    }
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    own = _read_own(name, options, screen)
    with sigterm_interrupts(), service_for(url, screen) as service:
        client = service.client
        finished = follow(
            client,
            lambda: (
                client.experiments.create_builtin(name, **options) if own is None else client.experiments.create(**own)
            ),
            screen,
        )
        _print_result(finished, screen)
        ends = service.home is not None and not keep_serving
        screen.progress(_dashboard(f"{client.url}/ui/experiments/{finished.id}", service.home if ends else None))
        if keep_serving:
            _wait_for_interrupt(screen)
    raise typer.Exit(_exit_code(finished))


def _read_own(name: str, options: dict[str, Any], screen: Screen) -> dict[str, Any] | None:
    """Read the experiment that a file holds; None where `name` is no file's."""
    from muonscope.cli.ray_jobs import with_working_dir
    from muonscope.cli.spec_files import names_a_file, read_experiment

    if not names_a_file(name):
        return None
    if options:
        option = f"--{next(iter(options)).replace('_', '-')}"
        raise typer.BadParameter(f"{name} says itself what its runs are; put it under base there", param_hint=option)
    own = read_experiment(name, screen.progress)
    return {**own, "base": with_working_dir(own["base"])}


@experiment_app.command("show")
def show(experiment_id: ExperimentId, url: Url = None, as_json: Json = False) -> None:
    """Print an experiment's table as it stands."""
    screen = Screen(as_json)
    with open_client(url) as client:
        _print_result(client.experiments.get(experiment_id), screen)


@experiment_app.command("ls")
def ls(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many.")] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List experiments, newest first."""
    from itertools import islice

    screen = Screen(as_json)
    with open_client(url) as client:
        experiments = list(islice(client.experiments.list(), limit))
    if as_json:
        screen.json(experiments)
    elif experiments:
        screen.table(
            ("experiment", "name", "status", "runs"),
            [(each.id, each.name, each.status or "", str(len(each.runs))) for each in experiments],
        )
    else:
        screen.progress("no experiments yet: `muonscope experiment run thirty-step` runs one")


def follow(client: "Client", queue: Callable[[], "Experiment"], screen: Screen) -> "Experiment":
    """Queue an experiment and show its runs' progress to their end; stop them when the command is told to end."""
    from muonscope.cli.progress import follow_runs

    with held_interrupts() as release:
        experiment = latest = queue()
        try:
            release()
            with follow_runs(experiment.runs, screen) as progress:
                for latest in client.experiments.watch(experiment.id):
                    progress.update(latest.runs)
        except KeyboardInterrupt:
            _stop_what_goes(client, latest, screen)
            raise typer.Exit(exit_codes.STOPPED) from None
    return latest


def _stop_what_goes(client: "Client", experiment: "Experiment", screen: Screen) -> None:
    from muonscope.errors import Conflict

    num_stopped = 0
    for run in experiment.runs:
        if run.is_finished:
            continue
        try:
            client.runs.stop(run.id)
        except Conflict:
            # It has ended since it was looked at: the others go on until they are stopped.
            continue
        num_stopped += 1
        screen.progress(f"stopped {run.id} ({run.name})")
    ended = len(experiment.runs) - num_stopped
    screen.progress(
        f"stopped {num_stopped} of experiment {experiment.id}'s {len(experiment.runs)} runs; {ended} had ended"
    )
    screen.progress(
        f"`muonscope experiment show {experiment.id}` shows them, `muonscope retry RUN` gives one another attempt"
    )


def _print_result(experiment: "Experiment", screen: Screen) -> None:
    from muonscope.cli.experiment_views import result_table

    if screen.as_json:
        screen.json(experiment)
        return
    columns, rows = result_table(experiment)
    screen.table(columns, rows, title=f"{experiment.name} ({experiment.id})")


def _exit_code(experiment: "Experiment") -> int:
    from muonscope.cli.experiment_views import experiment_exit_code

    return experiment_exit_code(experiment)


def _dashboard(address: str, home: Path | None) -> str:
    """Where to look at the result; with the state's folder where its service is about to end."""
    if home is None:
        return f"dashboard: {address}"
    folder = f"MUONSCOPE_HOME={home} " if home != Path("~/.muonscope").expanduser() else ""
    # As it was started: the command need not be on the path.
    command = shlex.join([sys.argv[0], "up"]) if sys.argv[0].endswith("muonscope") else "muonscope up"
    return f"dashboard: {address}, once `{folder}{command}` serves this record again"


def _wait_for_interrupt(screen: Screen) -> None:
    import signal

    screen.progress("serving until Ctrl-C")
    try:
        signal.pause()
    except KeyboardInterrupt:
        return
