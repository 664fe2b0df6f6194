"""Artifacts: what a run leaves behind, listed, and downloaded by name."""

from datetime import datetime
from typing import Annotated
from urllib.parse import quote

from fastapi import Path
from fastapi.responses import Response, StreamingResponse

from service.api.dependencies import DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS, Out
from service.artifacts import Artifact, list_artifacts
from service.errors import NotFound
from service.store.runs import RunRepository

router = Router(prefix="/runs/{run_id}/artifacts", tags=["runs"], responses=PROBLEMS)

RunId = Annotated[str, Path(max_length=64, description="The run's id.")]
Name = Annotated[str, Path(max_length=200, description="As the list says it.", examples=["spec.json"])]


class ArtifactOut(Out):
    name: str
    kind: str
    """spec, resolved_config, environment, log or checkpoint."""
    attempt: int | None
    """The number of the attempt that made it."""
    media_type: str
    total_bytes: int | None
    created_at: datetime
    is_here: bool
    """Whether this service can read it: checkpoints lie where the workers keep them."""
    url: str


class ArtifactsOut(Out):
    artifacts: list[ArtifactOut]


@router.get("", summary="List what a run leaves behind")
def read_artifacts(run_id: RunId, database: DatabaseDependency, settings: SettingsDependency) -> ArtifactsOut:
    with database.read() as session:
        run = RunRepository(session).get(run_id)
        found = list_artifacts(session, run, settings.effective_workers_home)
    return ArtifactsOut(artifacts=[_present(run.uid, artifact) for artifact in found])


@router.get(
    "/{name:path}",
    summary="Download one, by its name",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}, "application/json": {}, "text/plain": {}}}},
)
def download(run_id: RunId, name: Name, database: DatabaseDependency, settings: SettingsDependency) -> Response:
    with database.read() as session:
        run = RunRepository(session).get(run_id)
        named = {one.name: one for one in list_artifacts(session, run, settings.effective_workers_home)}
        artifact = named.get(name)
        if artifact is None:
            raise NotFound(
                f"run {run.uid} has no artifact of this name", field="name", value=name,
                remedy=f"GET /runs/{run.uid}/artifacts lists them",
            )  # fmt: skip
        content = artifact.read()
    last = artifact.name.rsplit("/", 1)[-1]
    headers = {"Content-Disposition": f'attachment; filename="{last}"'}
    return StreamingResponse(content, media_type=artifact.media_type, headers=headers)


def _present(uid: str, artifact: Artifact) -> ArtifactOut:
    return ArtifactOut(
        name=artifact.name,
        kind=artifact.kind,
        attempt=artifact.attempt,
        media_type=artifact.media_type,
        total_bytes=artifact.total_bytes,
        created_at=artifact.created_at,
        is_here=artifact.is_here,
        url=f"/runs/{uid}/artifacts/{quote(artifact.name)}",
    )
