"""GET /metrics in Prometheus's text format, written here: a client library would bring a process-wide registry for
what is counted in the store anyway."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from fastapi import Response

from muonscope.contract.telemetry import encode_number
from service.api.dependencies import ControllerDependency, DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.store.census import take_census
from service.store.models import Run
from service.store.runs import RunRepository
from service.store.summary import get_scalar

router = Router(tags=["health"], responses=PROBLEMS)

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_INFINITIES: Final = {"Infinity": "+Inf", "-Infinity": "-Inf"}
MAX_LIVE_RUNS: Final = 200

Samples = Sequence[tuple[Mapping[str, str], float | None]]


@router.get("/metrics", summary="Read the service's state in Prometheus's text format", response_class=Response)
def get_metrics(database: DatabaseDependency, controller: ControllerDependency) -> Response:
    with database.read() as session:
        census = take_census(session)
        live = list(RunRepository(session).live())[:MAX_LIVE_RUNS]
        text = "".join(
            [
                *_metric("muonscope_ready", "Whether runs submitted now would be stored and started.", "gauge",
                         [({}, float(not controller.problems))]),
                *_metric("muonscope_gpus", "GPUs of the cluster, as last seen.", "gauge",
                         [({}, controller.total_gpus())]),
                *_metric("muonscope_runs", "Runs by status.", "gauge",
                         [({"status": status}, count) for status, count in census.runs.items()]),
                *_metric("muonscope_verdicts", "Ended runs by verdict.", "gauge",
                         [({"verdict": verdict}, count) for verdict, count in census.verdicts.items()]),
                *_metric("muonscope_attempts", "Attempts by status.", "gauge",
                         [({"status": status}, count) for status, count in census.attempts.items()]),
                *_metric("muonscope_steps_stored", "Steps in the store.", "gauge", [({}, census.steps)]),
                *_metric("muonscope_alarms", "Events in the store that contradict it.", "gauge", [({}, census.alarms)]),
                *_metric("muonscope_gaps", "Declared gaps of records in the store.", "gauge", [({}, census.gaps)]),
                *_metric("muonscope_database_bytes", "Size of the database.", "gauge", [({}, census.database_bytes)]),
                *_live(live),
            ]
        )  # fmt: skip
    return Response(text, media_type=MEDIA_TYPE)


def _live(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what live runs are doing; runs that have ended leave the exposition."""
    labelled = [({"run": run.uid, "name": run.name, "ordering": run.step_ordering}, run.summary) for run in runs]
    for name, text, field in (
        ("steps", "Steps recorded.", "steps"),
        ("overflows", "Steps with an overflow.", "overflows"),
        ("discarded", "Discarded steps.", "discarded"),
    ):
        samples = [(labels, float(getattr(summary, field))) for labels, summary in labelled]
        yield from _metric(f"muonscope_run_{name}", f"{text} Live runs.", "gauge", samples)
    for name, text, field in (
        ("loss_scale", "Newest loss scale.", "final_loss_scale"),
        ("loss", "Newest loss.", "last_loss"),
        ("momentum_norm", "Newest momentum norm.", "last_momentum_norm"),
    ):
        measured = [(labels, get_scalar(summary, field)) for labels, summary in labelled]
        yield from _metric(f"muonscope_run_{name}", f"{text} Live runs.", "gauge", measured)


def _metric(name: str, text: str, kind: str, samples: Samples) -> Iterator[str]:
    """Yield one family; what was not measured is left out."""
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        if value is not None:
            shown = encode_number(float(value))
            listed = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            yield f"{name}{{{listed}}} {_INFINITIES.get(str(shown), shown)}\n" if listed else f"{name} {shown}\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
