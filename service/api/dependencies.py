"""What endpoints take from the application: the database, the settings, and the controller's face.

The api never imports the controller: `service/app.py` puts an object that satisfies `Controller` on the application's
state, and endpoints ask for it here.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Protocol, cast

from fastapi import Depends, Request

from muonscope.contract.attempts import Failure
from muonscope.contract.status import RunStatus
from service.settings import Settings
from service.store.session import Database

CALLER_HEADER: Final = "Muonscope-User"
MAX_CALLER_LENGTH: Final = 100


class Controller(Protocol):
    """What endpoints may ask of the controller. The plain methods are thread-safe and never block."""

    @property
    def legal(self) -> Mapping[RunStatus, Collection[RunStatus]]:
        """From each run status, those it may change to: for RunRepository.set_status."""

    @property
    def problems(self) -> list[str]:
        """What keeps runs from starting now (Ray unreachable, loop not ticking); empty when nothing does."""

    def wake(self) -> None:
        """Have the loop look at once: something was submitted, asked to stop, or has ended."""

    def retry_reason(self, failure: Failure | None, attempts: int) -> str | None:
        """Say why a run whose attempt number `attempts` ended so gets another one; None: it does not."""

    async def job_logs(self, submission_id: str) -> str | None:
        """Return what an attempt's driver has printed so far; None where Ray no longer knows the job."""

    def cluster(self) -> Mapping[str, Any]:
        """Describe the cluster's nodes, GPUs and who holds them, as GET /cluster answers."""

    def most_gpus(self) -> float | None:
        """Return how many GPUs a run may ask for at most; None while nobody can say: it may wait for workers."""

    def total_gpus(self) -> float | None:
        """Return the cluster's GPUs as last seen; None before Ray was first reached."""


# All of them are coroutines: FastAPI would send each plain function to a thread of its own, once a request.


async def get_database(request: Request) -> Database:
    return cast(Database, request.app.state.database)


async def get_settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


async def get_controller(request: Request) -> Controller:
    return cast(Controller, request.app.state.controller)


async def get_caller(request: Request) -> str:
    """Name who asks: whom their token proves them to be, else whom they say they are, else `api`."""
    proven = getattr(request.state, "caller", None)
    if isinstance(proven, str) and proven:
        return proven
    said = request.headers.get(CALLER_HEADER, "")
    return "".join(character for character in said if character.isprintable()).strip()[:MAX_CALLER_LENGTH] or "api"


DatabaseDependency = Annotated[Database, Depends(get_database)]
SettingsDependency = Annotated[Settings, Depends(get_settings)]
CallerDependency = Annotated[str, Depends(get_caller)]
ControllerDependency = Annotated[Controller, Depends(get_controller)]
