"""What is measured: each tracker as its documentation says it is used, behind one face.

Loaded by the yardstick under each tracker's own interpreter: nothing is imported before it is needed.
"""

import os
import struct
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[str, float]


class Tracker(ABC):
    """`open`, `log` for each step, `close`: everything is durable when it returns. `count`: readable steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def open(self) -> None:
        """Begin a run."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """Log one step."""

    @abstractmethod
    def close(self) -> None:
        """Return once all that was logged is durable."""

    @abstractmethod
    def count(self) -> int:
        """Return how many steps can be read back."""

    def shutdown(self) -> None:  # noqa: B027 - most have nothing to end
        """End what `open` started beside this process."""


class Muonscope(Tracker):
    """The whole path: spool, shipper process, HTTP, a service process of its own with SQLite."""

    def open(self) -> None:
        from recorder import Recorder, Service

        from muonscope.contract.telemetry import COUNTS, SCALARS, StepRecord

        self._record_type, self._fields = StepRecord, {*SCALARS, *COUNTS}
        self._service = Service(self.folder / "home")
        self._service.start()
        self._recorder = Recorder(self._service)
        (self.folder / "run").write_text(self._recorder.run_id)

    def log(self, step: int, values: Values) -> None:
        if "loss" in values:
            fields: Any = dict(values)
            for name in ("nonfinite_parameters", "ns_calls"):
                fields[name] = int(fields[name])
            self._recorder.record(self._record_type(step, False, False, **fields))
        else:
            norms = array("f", values.values()).tobytes()
            self._recorder.record(self._record_type(step, False, False, parameter_norms=norms))

    def close(self) -> None:
        self._recorder.wait_until_stored()
        self._recorder.spool.close()

    def shutdown(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            service.end()

    def count(self) -> int:
        """Start what was killed again, as the driver and Ray would, and read what the record then holds."""
        from recorder import Service, settle_spool

        self._service = Service(self.folder / "home")
        if not self._service.is_ready():
            self._service.start()
        run_id = (self.folder / "run").read_text()
        settle_spool(self._service.home / "spool" / run_id)
        return int(self._service.get(f"/runs/{run_id}")["summary"]["steps"])


class Trackio(Tracker):
    def open(self) -> None:
        self._prepare()
        import trackio

        self._trackio = trackio
        trackio.init(project="bench", name="run-0", embed=False)

    def log(self, step: int, values: Values) -> None:
        self._trackio.log(values, step=step)

    def close(self) -> None:
        self._trackio.finish()

    def count(self) -> int:
        self._prepare()
        from trackio.sqlite_storage import SQLiteStorage

        return sum("loss" in row for row in SQLiteStorage.get_logs("bench", "run-0"))

    def _prepare(self) -> None:
        home = self.folder / "trackio"
        home.mkdir(exist_ok=True)
        os.environ.update(
            TRACKIO_DIR=str(home), HF_HOME=str(self.folder / "hf"), HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1",
            GRADIO_ANALYTICS_ENABLED="False",
        )  # fmt: skip


class MlflowBatch(Tracker):
    """Best practice: `log_batch` with MLflow's largest batch of 1000 metrics, into SQLite."""

    def open(self) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._mlflow, self._metric = self._prepare(), Metric
        self._run = mlflow.start_run(run_name="run-0")
        self._client, self._waiting = mlflow.MlflowClient(), list[Any]()

    def log(self, step: int, values: Values) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) + len(values) > 1000:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._mlflow.end_run()

    def count(self) -> int:
        mlflow = self._prepare()
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name("bench")
        run = client.search_runs([experiment.experiment_id], "attributes.run_name = 'run-0'")[0]
        return len(client.get_metric_history(run.info.run_id, "loss"))

    def _flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._run.info.run_id, metrics=self._waiting)
            self._waiting = []

    def _prepare(self) -> Any:
        # Nothing here may wait for a network.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{self.folder}/mlflow.db")
        mlflow.set_experiment("bench")
        return mlflow


class WandbOffline(Tracker):
    def open(self) -> None:
        os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(self.folder), WANDB_SILENT="true")
        os.environ.update(WANDB_CACHE_DIR=str(self.folder / "cache"), WANDB_DATA_DIR=str(self.folder / "data"))
        import wandb

        plain = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True)
        self._run = wandb.init(project="bench", name="run-0", id="run-0", mode="offline", settings=plain)

    def log(self, step: int, values: Values) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()

    def count(self) -> int:
        from wandb.proto import wandb_internal_pb2

        (path,) = (self.folder / "wandb").glob("offline-run-*-run-0/run-*.wandb")
        count = 0
        for data in _log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                names = {item.key or "/".join(item.nested_key) for item in record.history.item}
                count += "loss" in names
        return count


def _log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, W&B's file, up to the first torn one."""
    offset, parts = 7, b""
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        if kind == 0 or offset + 7 + length > len(data):
            return
        parts = (
            data[offset + 7 : offset + 7 + length] if kind in (1, 2) else parts + data[offset + 7 : offset + 7 + length]
        )
        offset += 7 + length
        if kind in (1, 4):
            yield parts


TRACKERS = {"muonscope": Muonscope, "trackio": Trackio, "mlflow_batch": MlflowBatch, "wandb_offline": WandbOffline}
