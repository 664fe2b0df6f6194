"""The mirror on a real MLflow, under the interpreter of `.venv-trackers`; `test_mlflow_mirror.py` runs it.

    python -m tests.faults.mlflow_mirroring carry DATABASE_URL MLFLOW_URI [DIE_AFTER]
    python -m tests.faults.mlflow_mirroring read DATABASE_URL MLFLOW_URI

`carry` goes on until nothing is due, or kills itself once MLflow has taken so many pieces, before the last is noted.
`read` prints what MLflow has of its only run.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from service.controller.mirror import Measured, Mirror
from service.controller.mlflow_tracking import MlflowTracking
from service.store.mirrors import MirrorRepository
from service.store.session import Database

EXPERIMENT = "mirrored"


class Dying(MlflowTracking):
    """Takes some pieces, and the process with the last of them."""

    left = 0

    def log(self, remote_id: str, metrics: Sequence[Measured]) -> None:
        super().log(remote_id, metrics)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def carry(database: Database, uri: str, die_after: int) -> None:
    def connect() -> MlflowTracking:
        tracking = Dying(uri, EXPERIMENT)
        tracking.left = die_after
        return tracking

    mirror = Mirror(database, connect, target="mlflow", is_leading=lambda: True)
    while True:
        with database.read() as session:
            if not MirrorRepository(session).behind("mlflow", limit=1):
                return
        assert mirror.carry()


def read(uri: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "tags": run.data.tags,
        "metrics": {
            key: [(metric.step, repr(metric.value)) for metric in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        },
    }


def main() -> None:
    verb, database_url, uri, *rest = sys.argv[1:]
    if verb == "carry":
        database = Database(database_url)
        carry(database, uri, int(rest[0]) if rest else 0)
        database.dispose()
    else:
        print(json.dumps(read(uri)))


if __name__ == "__main__":
    main()
