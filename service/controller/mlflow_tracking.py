"""MLflow as a mirror's tracker; the only module that knows its client, which `muonscope[mlflow]` installs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from muonscope.contract.status import RunStatus
from service.controller.mirror import Measured, TrackingAway, TrackingRefused

_RUN_TAG: Final = "muonscope.run_id"
# MLflow's own limits.
_MAX_PARAMS: Final = 100
_MAX_KEY, _MAX_PARAM, _MAX_TAG = 250, 6000, 5000
_STATUSES: Final = {RunStatus.SUCCEEDED: "FINISHED", RunStatus.FAILED: "FAILED", RunStatus.STOPPED: "KILLED"}
_TOO_MANY: Final = 429
_SERVER_ERROR: Final = 500


class MlflowTracking:
    """Runs of one MLflow experiment, each found by its tag `muonscope.run_id`."""

    def __init__(self, uri: str, experiment: str) -> None:
        """Find the experiment, or make it.

        Raises:
            TrackingAway: MLflow does not answer.
            TrackingRefused: it will not have such an experiment.
        """
        from mlflow import MlflowClient

        with _translated():
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            self._experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)

    def open_run(self, uid: str, name: str, *, started_ms: int, params: Mapping[str, str]) -> str:
        from mlflow.entities import Param

        with _translated():
            query = f"tags.`{_RUN_TAG}` = '{uid}'"
            found = self._client.search_runs([self._experiment_id], filter_string=query, max_results=1)
            run = found[0] if found else self._client.create_run(
                self._experiment_id, start_time=started_ms, tags={_RUN_TAG: uid}, run_name=name
            )  # fmt: skip
            remote_id = str(run.info.run_id)
            listed = [Param(key[:_MAX_KEY], value[:_MAX_PARAM]) for key, value in params.items()]
            for first in range(0, len(listed), _MAX_PARAMS):
                self._client.log_batch(remote_id, params=listed[first : first + _MAX_PARAMS])
            return remote_id

    def log(self, remote_id: str, metrics: Sequence[Measured]) -> None:
        from mlflow.entities import Metric

        with _translated():
            listed = [Metric(it.key, it.value, it.timestamp_ms, it.step) for it in metrics]
            self._client.log_batch(remote_id, metrics=listed)

    def set_tags(self, remote_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        with _translated():
            self._client.log_batch(remote_id, tags=[RunTag(key, value[:_MAX_TAG]) for key, value in tags.items()])

    def set_status(self, remote_id: str, status: RunStatus, *, ended_ms: int | None) -> None:
        with _translated():
            if status.is_terminal:
                self._client.set_terminated(remote_id, _STATUSES[status], ended_ms)
            else:
                self._client.update_run(remote_id, status="RUNNING")


@contextmanager
def _translated() -> Iterator[None]:
    """Tell "not now" from "never" by what MLflow says."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        status: Any = error.get_http_status_code()
        if status >= _SERVER_ERROR or status == _TOO_MANY:
            raise TrackingAway(str(error)) from error
        raise TrackingRefused(str(error)) from error
    except OSError as error:
        raise TrackingAway(f"{type(error).__name__}: {error}") from error
