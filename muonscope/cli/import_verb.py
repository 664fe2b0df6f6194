"""The verb import: a record made elsewhere becomes a run. A record file's, or what DeepSpeed's CSV monitor wrote."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from muonscope.cli.options import Json, Url, open_client
from muonscope.cli.screen import Screen, counted

if TYPE_CHECKING:
    from muonscope.client import Client, Run

# A batch's columns may take 64 MiB when they arrive.
MAX_STEPS: Final = 500_000
_NO_RUN: Final = "give the file that `muonscope run --standalone` or `muonscope.record(file=…)` has trained into"


def import_record(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A record file, of `muonscope.record` or `run --standalone`; or the folder that DeepSpeed's CSV "
            "monitor wrote: its job's name.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The run's name, of a monitor's folder.  [default: the folder's]", show_default=False),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Keep a record that was made elsewhere: a record file's runs whole, a monitor's folder as one run."""
    screen = Screen(as_json)
    with open_client(url) as client:
        if path.is_file():
            _import_file(client, path, screen)
            return
        run = _import_folder(client, path, name)
    if as_json:
        screen.json([run])
    else:
        screen.line(f"{run.id} holds {counted(run.summary.steps, 'step')} of {run.name}")


def _import_file(client: "Client", path: Path, screen: Screen) -> None:
    from muonscope.cli.record_files import read_records
    from muonscope.client.calls import import_run
    from muonscope.client.deepspeed_csv import ImportFailed

    kept, passed_over = [], []

    def tell(line: str) -> None:
        passed_over.append(line)
        screen.progress(line)

    for record in read_records(path, tell):
        run, is_new = client.send(import_run(record))
        kept.append(run)
        if not screen.as_json:
            # What printed the old id is often a log, and nothing answers to it here.
            here = "here" if is_new else "already here"
            screen.line(f"{record.id} is run {run.id} {here}: {counted(run.summary.steps, 'step')} of {run.name}")
    if not kept:
        what = "has no run that has ended" if passed_over else "holds no run"
        raise ImportFailed(path, what, remedy="let its run end, then import again" if passed_over else _NO_RUN)
    if screen.as_json:
        screen.json(kept)


def _import_folder(client: "Client", path: Path, name: str | None) -> "Run":
    from muonscope.client.calls import Call
    from muonscope.client.deepspeed_csv import ImportFailed, read_monitor_folder
    from muonscope.client.models import Run
    from muonscope.contract.telemetry import encode_batch, encode_record

    log = read_monitor_folder(path)
    if len(log.records) > MAX_STEPS:
        raise ImportFailed(path, f"{len(log.records)} steps are too many at once", remedy=f"import at most {MAX_STEPS}")
    body = encode_batch([encode_record(record) for record in log.records], epoch=0)
    source = f"DeepSpeed CSV monitor: {path.resolve()}, {log.batch_size} samples a step"
    params = {"name": name or log.name, "source": source[:500]}
    return client.send(
        Call("POST", "/imports/steps", Run.model_validate, params=params, body=body, is_repeatable=False)
    )
