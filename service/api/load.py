"""How busy a run's ranks, their nodes and GPUs were."""

from typing import Annotated, Final

from fastapi import Query

from muonscope.contract.attempts import LoadSample
from service.api.dependencies import DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, Out
from service.api.steps import RunId
from service.store.load import LoadRepository
from service.store.models import SystemLoad
from service.store.runs import RunRepository

router = Router(prefix="/runs", tags=["load"], responses=PROBLEMS)

MAX_SAMPLES: Final = 100_000


class LoadOut(Out):
    """One sample of one rank, every 5 s; null: could not be measured, as the GPU's where there is none."""

    attempt: int
    rank: int
    at: float
    """Unix seconds, on the rank's clock."""
    cpu_percent: float | None
    """Of one core, the process's own threads together."""
    memory_bytes: int | None
    node_cpu_percent: float | None
    node_memory_bytes: int | None
    node_memory_total_bytes: int | None
    gpu_percent: float | None
    gpu_memory_bytes: int | None
    gpu_memory_total_bytes: int | None


class LoadsOut(Out):
    samples: list[LoadOut]
    next_after: float | None
    """What `after` gives the following ones; null when these are all."""


@router.get("/{run_id}/load", summary="Read how busy a run's ranks, nodes and GPUs were")
def get_load(
    run_id: RunId,
    database: DatabaseDependency,
    attempt: Annotated[int | None, Query(ge=1, le=2**31, description="By default all.")] = None,
    after: Annotated[float, Query(ge=0, lt=2**33, description="Only samples later than this, Unix seconds.")] = 0.0,
    limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES)] = 10_000,
) -> LoadsOut:
    with database.read() as session:
        run = RunRepository(session).get(run_id)
        found = LoadRepository(session).list(run, attempt=attempt, after=after, limit=limit + run.world_size)
    samples = [_present(number, sample) for number, sample in found]
    if len(samples) <= limit:
        return LoadsOut(samples=samples, next_after=None)
    # A page ends between two moments, else `after` would leave out those of the ranks that share one.
    cut = limit
    while cut and samples[cut].at == samples[cut - 1].at:
        cut -= 1
    cut = cut or len(samples)
    return LoadsOut(samples=samples[:cut], next_after=samples[cut - 1].at)


def _present(attempt: int, sample: SystemLoad) -> LoadOut:
    measured = {name: getattr(sample, name) for name in LoadSample.model_fields if name not in ("rank", "at")}
    return LoadOut(attempt=attempt, rank=sample.rank, at=sample.at.timestamp(), **measured)
