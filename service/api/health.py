"""Is it alive, and can it take runs."""

from service.api.dependencies import ControllerDependency, DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.errors import Unavailable

router = Router(tags=["health"], responses=PROBLEMS)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer while the process lives."""
    return {"status": "alive"}


@router.get("/readyz")
def readyz(database: DatabaseDependency, controller: ControllerDependency) -> dict[str, str]:
    """Answer 200 when a run submitted now would be stored and started: database, Ray and the loop all work."""
    database.ping()
    problems = controller.problems
    if problems:
        raise Unavailable("; ".join(problems), remedy="wait; see the service's log if it stays so")
    return {"status": "ready"}
