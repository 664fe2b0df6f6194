"""create_app(): wiring and lifespan only."""

import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware

from service.api import (
    access,
    alerts,
    artifacts,
    attempts,
    audit,
    cluster,
    compare,
    deletion,
    events,
    experiments,
    health,
    imports,
    load,
    logs,
    metrics,
    problems,
    queue,
    recordings,
    reference,
    runs,
    session,
    steps,
)
from service.api.access import Access, Authenticator
from service.api.feed import ChangeFeed
from service.api.middleware import BodyLimit, OneWriter, Problems, SecurityHeaders, ServerTiming, TrustedCaller
from service.api.rate_limit import RateLimiter
from service.controller.housekeeping import Housekeeper
from service.controller.launcher import Launcher
from service.controller.leadership import Leadership
from service.controller.local_ray import LocalRay
from service.controller.loop import ControllerLoop
from service.controller.mirror import Mirror, Tracking
from service.controller.ray_launcher import RayLauncher, read_token
from service.controller.token_files import TokenFiles
from service.controller.worker_environment import worker_environment
from service.dashboard import views
from service.errors import Unavailable
from service.settings import Settings
from service.store import migrate
from service.store.session import Database

logger = logging.getLogger(__name__)

ROUTERS: Final = (
    runs.router,
    logs.router,
    artifacts.router,
    steps.router,
    load.router,
    deletion.router,
    imports.router,
    recordings.router,
    events.router,
    compare.router,
    experiments.router,
    attempts.router,
    queue.router,
    alerts.router,
    cluster.router,
    health.router,
    metrics.router,
    session.router,
    audit.router,
    reference.router,
    views.home,
    views.router,
)


def create_app(settings: Settings, launcher: Launcher | None = None) -> FastAPI:
    """Build the application; nothing is opened before its lifespan begins.

    Args:
        settings: where and how it runs.
        launcher: where jobs run; None is the Ray cluster of the settings, or a local one started for the service.
    """
    database = Database(settings.effective_database_url)
    local_ray = LocalRay(settings) if launcher is None and settings.ray_address is None else None
    used = launcher or _ray_launcher(settings, local_ray)
    feed = ChangeFeed(database)
    leadership = Leadership(database, settings.effective_advertise_url)
    controller = ControllerLoop(
        database,
        used,
        settings,
        owner=store_id(settings),
        leadership=leadership,
        on_change=feed.notify,
        expected_gpus=local_ray.gpus if local_ray is not None else None,
        gpus_are_logical=not local_ray.has_real_gpus if local_ray is not None else None,
    )
    app = FastAPI(
        title="Muonscope",
        summary="Queue Muon training runs, record every step, compare step orderings.",
        version=_version(),
        # Not included but taken over: FastAPI works an included route out anew, half a second at the first request.
        routes=[route for router in ROUTERS for route in router.routes],
        redirect_slashes=False,
        # FastAPI's own pages load their scripts from elsewhere: `reference` has one that needs none.
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(
            database,
            controller,
            leadership,
            Housekeeper(database, settings, leadership),
            _mlflow_mirror(database, settings, leadership),
            feed,
            local_ray,
        ),
    )
    app.state.settings = settings
    app.state.database = database
    app.state.controller = controller
    app.state.feed = feed
    problems.install(app)
    forgotten = access.undeclared(route for router in ROUTERS for route in router.routes)
    if forgotten:
        raise RuntimeError(f"say in service/api/access.py who may ask for {', '.join(forgotten)}")
    app.state.authenticator = Authenticator(database, standing_by=lambda: controller.standing_by)
    _add_middleware(app, settings, controller)
    return app


def store_id(settings: Settings) -> str:
    """Name this store to Ray: two services that share a cluster stop only their own jobs."""
    return hashlib.sha256(settings.database_address.encode()).hexdigest()[:16]


def _ray_launcher(settings: Settings, local_ray: LocalRay | None) -> RayLauncher:
    if local_ray is not None:
        # The local Ray's own environment carries what workers need: jobs stay free of runtime environments.
        return RayLauncher(
            lambda: local_ray.address,
            token=lambda: local_ray.token,
            token_files=TokenFiles(settings.home / "enrolment"),
        )
    return RayLauncher(
        lambda: settings.ray_address,
        token=lambda: read_token(settings.ray_token_file),
        environment=worker_environment(has_gpus=True),
    )


def _mlflow_mirror(database: Database, settings: Settings, leadership: Leadership) -> Mirror | None:
    uri, experiment = settings.mlflow_tracking_uri, settings.mlflow_experiment
    if uri is None:
        return None

    def connect() -> Tracking:
        # Seconds to import, on the mirror's own thread.
        from service.controller.mlflow_tracking import MlflowTracking

        return MlflowTracking(uri, experiment)

    # An address may hold a password.
    target = hashlib.sha256(f"mlflow {uri} {experiment}".encode()).hexdigest()[:16]
    return Mirror(database, connect, target=target, is_leading=lambda: leadership.is_leading)


def _lifespan(
    database: Database,
    controller: ControllerLoop,
    leadership: Leadership,
    housekeeper: Housekeeper,
    mirror: Mirror | None,
    feed: ChangeFeed,
    local_ray: LocalRay | None,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await run_in_threadpool(migrate.upgrade, database)
            stack.callback(database.dispose)
            await feed.start()
            stack.push_async_callback(feed.stop)
            if local_ray is not None:
                stack.push_async_callback(_stop_ray, local_ray, controller, leadership)
            stack.push_async_callback(leadership.stop)

            def begin() -> None:
                # A controller that stands by needs no Ray of its own.
                if local_ray is not None:
                    local_ray.start(on_ready=controller.wake, keep_running=controller.has_live_attempts)
                controller.wake()

            leadership.start(on_gain=begin)
            controller.start()
            stack.push_async_callback(controller.stop)
            housekeeper.start()
            stack.push_async_callback(housekeeper.stop)
            if mirror is not None:
                mirror.start()
                stack.push_async_callback(mirror.stop)
            yield

    return lifespan


async def _stop_ray(local_ray: LocalRay, controller: ControllerLoop, leadership: Leadership) -> None:
    # Who led once and leads no more leaves the head to the one that has taken it over. A run that was to be stopped
    # keeps none: nobody would be there to stop it.
    try:
        keep_running = leadership.another_leads or await run_in_threadpool(controller.has_wanted_attempts)
    except Unavailable as error:
        logger.warning("Ray goes on, as it may have live runs: %s", error, extra={"action": "ray_kept"})
        keep_running = True
    await local_ray.stop(keep_running=keep_running)


def _add_middleware(app: FastAPI, settings: Settings, controller: ControllerLoop) -> None:
    # Added innermost first: the last one added is the first that a request passes.
    # A page of the run table is 4 KB a run of mostly equal keys; event streams pass untouched.
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)
    app.add_middleware(OneWriter, standing_by=lambda: controller.standing_by)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        max_telemetry_bytes=settings.max_telemetry_bytes,
        timeout_s=settings.body_timeout_s,
    )
    app.add_middleware(
        Access,
        authenticator=app.state.authenticator,
        is_token_needed=settings.is_token_needed,
        limiter=RateLimiter(rate_per_s=settings.submit_rate_per_s, burst=settings.submit_burst),
    )
    app.add_middleware(Problems)
    app.add_middleware(TrustedCaller, hosts=settings.answered_hosts)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(ServerTiming)


def _version() -> str:
    try:
        return version("muonscope")
    except PackageNotFoundError:
        return "0"
