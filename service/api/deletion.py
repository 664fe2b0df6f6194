"""Deleting a run gives its disk back."""

import logging

from fastapi import BackgroundTasks, Response

from service.api.dependencies import CallerDependency, DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.api.steps import RunId
from service.errors import Unavailable
from service.store.retention import Retention

logger = logging.getLogger(__name__)

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
    retention = Retention(database, settings.kept_files_home)
    retention.delete(run_id, who=caller, why="deletion requested")
    afterwards.add_task(_reclaim, retention)
    return Response(status_code=204, background=afterwards)


def _reclaim(retention: Retention) -> None:
    try:
        retention.reclaim()
    except Unavailable as error:
        # The run is gone, and that was answered; the next one that goes gives its space back too.
        logger.warning("the disk space of deleted runs is not free yet: %s", error, extra={"action": "reclaim_failed"})
