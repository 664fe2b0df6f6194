"""The verb import: what DeepSpeed's CSV monitor wrote becomes a run."""

from pathlib import Path
from typing import Annotated, Final

import typer

from muonscope.cli.options import Json, Url, open_client
from muonscope.cli.screen import Screen

# A batch's columns may take 64 MiB when they arrive.
MAX_STEPS: Final = 500_000


def import_log(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The folder that DeepSpeed's CSV monitor wrote: its job's name.")
    ],
    name: Annotated[
        str | None, typer.Option(help="The run's name.  [default: the folder's]", show_default=False)
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Keep a DeepSpeed CSV monitor's log as a run: loss, learning rate and loss scale of each step."""
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
    with open_client(url) as client:
        call = Call("POST", "/imports/steps", Run.model_validate, params=params, body=body, is_repeatable=False)
        run = client.send(call)
    if as_json:
        print(run.model_dump_json())
    else:
        Screen().line(f"{run.id} holds {run.summary.steps} steps of {log.name}")
