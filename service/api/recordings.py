"""Scripts of somebody's own are recorded as they train: registered here, then told of by the attempt's own door."""

from muonscope.contract.recordings import Recording, RecordingStarted
from service.api.dependencies import CallerDependency, ControllerDependency, DatabaseDependency, SettingsDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.recordings import HEARTBEAT_S, begin_recording

router = Router(prefix="/recordings", tags=["runs"], responses=PROBLEMS)


@router.post("", status_code=201, summary="Begin to record a script that the service does not start")
def start_recording(
    recording: Recording,
    database: DatabaseDependency,
    settings: SettingsDependency,
    controller: ControllerDependency,
    caller: CallerDependency,
) -> RecordingStarted:
    """Answer with the token that the attempt's steps, heartbeats and outcome prove themselves by."""
    with database.write() as session:
        attempt, token = begin_recording(
            session, recording.spec, lease_s=settings.recording_lease_s, legal=controller.legal, who=caller,
            why="recorded as it trains",
        )  # fmt: skip
        return RecordingStarted(
            run_id=attempt.run.uid,
            attempt_id=attempt.submission_id,
            token=token,
            epoch=attempt.epoch,
            heartbeat_s=HEARTBEAT_S,
        )
