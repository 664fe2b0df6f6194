"""Deleting a run gives its disk back."""

from fastapi import BackgroundTasks, Response

from service.api.dependencies import CallerDependency, DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.api.steps import RunId
from service.store.retention import Retention

router = Router(prefix="/runs", tags=["runs"], responses=PROBLEMS)


@router.delete("/{run_id}", status_code=204, summary="Delete an ended run with its record, checkpoints and logs")
def delete_run(
    run_id: RunId,
    database: DatabaseDependency,
    settings: SettingsDependency,
    caller: CallerDependency,
    afterwards: BackgroundTasks,
) -> Response:
    """What it was cannot be had back; export it first. Its disk space is free a moment after the answer."""
    retention = Retention(database, settings.home)
    retention.delete(run_id, who=caller, why="deletion requested")
    afterwards.add_task(retention.reclaim)
    return Response(status_code=204, background=afterwards)
