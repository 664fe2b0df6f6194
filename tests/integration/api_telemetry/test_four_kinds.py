"""Numbers from the rank to every format and back: nan, both infinities and "not measured" stay four things."""

import csv
import io
import math
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muonscope.contract import telemetry
from muonscope.contract.telemetry import COUNTS, SCALARS, STEP_FIELDS, StepRecord, decode_number
from service.api import step_exports, step_schemas
from service.columns import NAN as NAN_KIND
from service.columns import StepColumns
from service.store import step_rows
from service.store.session import Database
from tests.examples import dear
from tests.integration.api_telemetry.workers import PARAMETERS, Workers, workers
from tests.records import norms
from workers import shipper as shipping
from workers import spool as spooling
from workers.shipper import Shipper
from workers.spool import Destination, SpoolWriter

NAN, INF = math.nan, math.inf

numbers = st.one_of(st.sampled_from([None, NAN, INF, -INF]), st.floats(width=64))
counts = st.none() | st.integers(-(2**63), 2**63 - 1)
all_norms = st.just(b"") | st.lists(st.floats(width=32), min_size=2, max_size=2).map(lambda it: norms(*it))


def same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def same_list(one: list[Any] | None, other: list[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def _from_json(step: dict[str, Any]) -> dict[str, Any]:
    return {name: decode_number(step[name]) for name in STEP_FIELDS}


def _from_csv(row: dict[str, str]) -> dict[str, Any]:
    read: dict[str, Any] = {"step": int(row["step"])}
    for name in ("overflow", "discarded"):
        read[name] = {"true": True, "false": False}[row[name]]
    for name in SCALARS:
        read[name] = float(row[name]) if row[name] else None
    for name in COUNTS:
        read[name] = int(row[name]) if row[name] else None
    return read


def _from_table(table: Any) -> list[dict[str, Any]]:
    """Read Arrow data without pandas, which would take null for NaN."""
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _through_the_spool(records: list[StepRecord], voice: Workers) -> None:
    """Carry the records as a rank does: appended to a spool, shipped from there."""
    with tempfile.TemporaryDirectory() as folder:
        destination = Destination(str(voice.client.base_url), voice.attempt_id, voice.token, voice.epoch)
        writer = SpoolWriter(Path(folder), destination)
        for record in records:
            writer.append(record)
        writer.close()
        with closing(Shipper(Path(folder))) as shipper:
            assert shipper.ship_once() == len(records)


def _hold(sent: list[StepRecord], client: httpx.Client, database: Database) -> None:
    """Send the records as a rank does, read them by every door, and hold what comes back against what was sent."""
    voice = workers(client, database)
    voice.post("facts", {"parameters": PARAMETERS})
    _through_the_spool(sent, voice)
    path = f"/runs/{voice.run_id}/steps"

    def exported(form: str) -> bytes:
        return client.get(path, params={"format": form}).content

    rows = [_from_json(step) for step in client.get(path).json()["steps"]]
    table = [_from_csv(row) for row in csv.DictReader(io.StringIO(exported("csv").decode()))]
    parquet = _from_table(pq.read_table(pa.BufferReader(exported("parquet"))))
    arrow = _from_table(pa.ipc.open_stream(exported("arrow")).read_all())
    series = client.get(path, params={"max_points": 100, "fields": ",".join(SCALARS)}).json()["series"]
    by_parameter = [client.get(f"/runs/{voice.run_id}/parameters/{index}/steps").json()["steps"] for index in range(2)]
    for place, record in enumerate(sent):
        for name in STEP_FIELDS:
            for read in (rows, table, parquet, arrow):
                assert same(read[place][name], getattr(record, name)), name
        for name in SCALARS:
            assert same(decode_number(series[name][place]), getattr(record, name)), name
        packed = np.frombuffer(record.parameter_norms, "<f4").tolist() or None
        for read in (parquet, arrow):
            assert same_list(read[place]["momentum_norms"], packed)
        shown = [decode_number(steps[place]["momentum_norm"]) for steps in by_parameter]
        assert same_list(None if shown == [None, None] else shown, packed)


@settings(max_examples=dear(8), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_values_stay_distinct_from_the_rank_to_every_format_and_back(
    any_client: httpx.Client, database: Database, data: st.DataObject
) -> None:
    sent = [
        StepRecord(
            step, data.draw(st.booleans()), data.draw(st.booleans()),
            *(data.draw(numbers) for _ in SCALARS), *(data.draw(counts) for _ in COUNTS), data.draw(all_norms),
        )
        for step in range(data.draw(st.integers(1, 4)))
    ]  # fmt: skip
    _hold(sent, any_client, database)


FOUR = [
    StepRecord(step, False, False, loss=value, parameter_norms=b"" if value is None else norms(value, 1.0))
    for step, value in enumerate([NAN, INF, -INF, None, 0.5])
]


def _merged(record: StepRecord, one: Any, other: Any) -> StepRecord:
    return replace(record, loss=other) if same(record.loss, one) else record


# Each station, and how it could take two of the four for one.
MERGERS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "spool": (spooling, "encode_record", lambda real: lambda record: real(_merged(record, None, NAN))),
    "wire": (
        shipping, "encode_batch",
        lambda real: lambda payloads, **rest: real(
            [telemetry.encode_record(_merged(telemetry.decode_record(it), -INF, INF)) for it in payloads], **rest
        ),
    ),
    "row": (StepColumns, "kinds", lambda real: lambda self, name: np.minimum(real(self, name), NAN_KIND)),
    "reading a row": (step_rows, "_VALUES", lambda real: {**real, 3: INF}),
    "reading a column": (
        step_rows, "restore", lambda real: lambda stored, kinds: (real(stored, kinds)[0], ~np.isnan(stored)),
    ),
    "json": (step_schemas, "encode_number", lambda real: lambda value: None if value != value else real(value)),
    "csv": (step_schemas, "_cell", lambda real: lambda record, name: real(record, name).replace("nan", "")),
    "parquet and arrow": (
        step_exports, "_record_batch",
        lambda real: lambda steps: real([replace(it, record=_merged(it.record, NAN, None)) for it in steps]),
    ),
    "one parameter": (
        step_schemas, "np",
        lambda real: type("Without", (), {"frombuffer": lambda *rest: real.nan_to_num(real.frombuffer(*rest)),
                                          "flatnonzero": real.flatnonzero, "isfinite": real.isfinite}),
    ),
}  # fmt: skip


def test_the_four_pass_every_station(any_client: httpx.Client, database: Database) -> None:
    _hold(FOUR, any_client, database)


@pytest.mark.parametrize("station", MERGERS)
def test_a_station_that_takes_two_of_the_four_for_one_is_noticed(
    client: httpx.Client, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, station: str
) -> None:
    place, name, merging = MERGERS[station]
    monkeypatch.setattr(place, name, merging(getattr(place, name)))

    with pytest.raises(AssertionError):
        _hold(FOUR, client, sqlite_database)
