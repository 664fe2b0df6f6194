"""The cluster: nodes, GPUs, who holds them."""

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import RunStatus
from service.api.dependencies import ControllerDependency, DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, ClusterOut, HolderOut
from service.store.models import Run
from service.store.runs import RunRepository

router = Router(tags=["cluster"], responses=PROBLEMS)


@router.get("/cluster", response_model=ClusterOut)
def read_cluster(database: DatabaseDependency, controller: ControllerDependency) -> ClusterOut:
    """Say what the cluster has, as last seen, and which runs hold its GPUs."""
    with database.read() as session:
        runs = RunRepository(session)
        holders = [_holder(run) for run in runs.live() if run.attempts]
        queued = runs.count_by_status()[RunStatus.QUEUED]
    return ClusterOut(
        **controller.cluster(), holders=holders, gpus_held=sum(holder.gpus for holder in holders), queued=queued
    )


def _holder(run: Run) -> HolderOut:
    spec = RunSpec.model_validate(run.spec)
    return HolderOut(
        run_id=run.uid,
        name=run.name,
        attempt=run.attempts[-1].submission_id,
        status=run.status,
        gpus=spec.world_size * spec.resources.gpus_per_rank,
    )
