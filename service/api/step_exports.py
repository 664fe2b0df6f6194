"""A run's record as a file, streamed: CSV, and with pyarrow Parquet and Arrow.

Each chunk is a transaction of its own, so that a slow reader holds none open. NaN, the infinities and "not measured"
stay apart: CSV writes `nan`, `inf`, `-inf` and nothing; Parquet and Arrow hold the numbers themselves and null.
"""

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

from fastapi.responses import StreamingResponse

from muonscope.contract.telemetry import COUNTS, SCALARS
from service.api.step_schemas import STEP_KEYS, csv_cells
from service.errors import InvalidInput
from service.store.runs import RunRepository
from service.store.session import Database
from service.store.steps import CurrentStep, StepRepository

Format = Literal["csv", "parquet", "arrow"]
Chunks = Iterator[Sequence[CurrentStep]]

CHUNK: Final = 5000
MEDIA_TYPES: Final[dict[Format, str]] = {
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
    "arrow": "application/vnd.apache.arrow.stream",
}


def export_steps(database: Database, run_id: str, form: Format, start: int, stop: int | None) -> StreamingResponse:
    """Answer with every step from start to stop as a file.

    Raises:
        NotFound: no such run.
        InvalidInput: a format that needs pyarrow, which is not installed.
    """
    if form != "csv" and importlib.util.find_spec("pyarrow") is None:
        raise InvalidInput(
            f"format={form} needs pyarrow, which this service's environment does not have", field="format", value=form,
            remedy="pip install 'muonscope[arrow]' there, or use format=csv",
        )  # fmt: skip
    with database.read() as session:
        RunRepository(session).get(run_id)
    write: dict[Format, Callable[[Chunks], Iterator[str] | Iterator[bytes]]] = {
        "csv": _csv, "parquet": _parquet, "arrow": _arrow,
    }  # fmt: skip
    headers = {"Content-Disposition": f'attachment; filename="{run_id}-steps.{form}"'}
    chunks = _chunks(database, run_id, start, stop)
    return StreamingResponse(write[form](chunks), media_type=MEDIA_TYPES[form], headers=headers)


def _chunks(database: Database, run_id: str, start: int, stop: int | None) -> Chunks:
    following: int | None = start
    while following is not None:
        with database.read() as session:
            run = RunRepository(session).get(run_id)
            page = StepRepository(session).page(run, start=following, stop=stop, limit=CHUNK)
        yield page.steps
        following = page.next_start


def _csv(chunks: Chunks) -> Iterator[str]:
    yield ",".join(STEP_KEYS) + "\r\n"
    for chunk in chunks:
        yield "".join(",".join(csv_cells(current)) + "\r\n" for current in chunk)


class _Outbox(io.RawIOBase):
    """A file that is emptied while it is written."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, piece: Any) -> int:
        self._pieces.append(bytes(piece))
        self._written += len(self._pieces[-1])
        return len(self._pieces[-1])

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


def _parquet(chunks: Chunks) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    outbox = _Outbox()
    with pq.ParquetWriter(pa.PythonFile(outbox, mode="w"), _schema(), compression="zstd") as writer:
        for chunk in chunks:
            writer.write_batch(_record_batch(chunk))
            yield outbox.take()
    yield outbox.take()


def _arrow(chunks: Chunks) -> Iterator[bytes]:
    import pyarrow as pa

    outbox = _Outbox()
    with pa.ipc.new_stream(pa.PythonFile(outbox, mode="w"), _schema()) as writer:
        for chunk in chunks:
            writer.write_batch(_record_batch(chunk))
            yield outbox.take()
    yield outbox.take()


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("overflow", pa.bool_(), nullable=False),
            pa.field("discarded", pa.bool_(), nullable=False),
            *(pa.field(name, pa.float64()) for name in SCALARS),
            *(pa.field(name, pa.int64()) for name in COUNTS),
            # By parameter index; null where the step's norms were not measured.
            pa.field("momentum_norms", pa.list_(pa.float32())),
        ]
    )


def _record_batch(steps: Sequence[CurrentStep]) -> Any:
    import pyarrow as pa

    records = [current.record for current in steps]
    packed = [record.parameter_norms for record in records]
    offsets = list(accumulate((len(norms) // 4 for norms in packed), initial=0))
    norms = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.Array.from_buffers(pa.float32(), offsets[-1], [None, pa.py_buffer(b"".join(packed))]),
        mask=pa.array([not norms for norms in packed], pa.bool_()),
    )
    columns = [
        pa.array([record.step for record in records], pa.int64()),
        pa.array([current.attempt for current in steps], pa.int32()),
        *(pa.array([getattr(record, name) for record in records], pa.bool_()) for name in ("overflow", "discarded")),
        *(pa.array([getattr(record, name) for record in records], pa.float64()) for name in SCALARS),
        *(pa.array([getattr(record, name) for record in records], pa.int64()) for name in COUNTS),
        norms,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema())
