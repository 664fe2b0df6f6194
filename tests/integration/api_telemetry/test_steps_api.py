"""A run's record as rows, series and CSV."""

import csv
import importlib.util
import io
import math
import tracemalloc
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.api.step_exports import CHUNK
from service.store.session import Database
from tests.integration.api_telemetry.workers import PARAMETERS, Workers, workers
from tests.records import discarded_record, insert, norms, step_record

NAN, INF = math.nan, math.inf


def test_a_format_that_needs_what_is_not_installed_says_what_to_install(
    client: httpx.Client, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = workers(client, sqlite_database)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find_spec(name))

    refused = client.get(f"/runs/{voice.run_id}/steps", params={"format": "parquet"})

    assert refused.status_code == 422
    assert (refused.json()["field"], refused.json()["value"]) == ("format", "parquet")
    assert "muonscope[arrow]" in refused.json()["remedy"]
    assert client.get(f"/runs/{voice.run_id}/steps", params={"format": "csv"}).status_code == 200


def test_a_file_of_many_chunks_is_whole_and_in_order(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database, steps=20_000)
    count = 2 * CHUNK + 17
    assert voice.steps([step_record(step) for step in range(count)]).status_code == 200

    for form, read in (("parquet", pq.read_table), ("arrow", lambda file: pa.ipc.open_stream(file).read_all())):
        body = client.get(f"/runs/{voice.run_id}/steps", params={"format": form, "start": 3}).content
        assert read(pa.BufferReader(body))["step"].to_pylist() == list(range(3, count))


def test_rows_come_in_pages_that_name_the_next(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.steps([step_record(step) for step in range(7)])

    def page(**params: int) -> tuple[list[int], int | None]:
        answer = client.get(f"/runs/{voice.run_id}/steps", params=params).json()
        return [step["step"] for step in answer["steps"]], answer["next_start"]

    assert page(limit=3) == ([0, 1, 2], 3)
    assert page(limit=3, start=6) == ([6], None)
    assert page(start=2, stop=5) == ([2, 3, 4], None)
    assert page(start=900) == ([], None)


def test_a_row_has_the_agreed_keys(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.steps([step_record(0, loss=NAN, update_norm=None)])
    (row,) = client.get(f"/runs/{voice.run_id}/steps").json()["steps"]

    assert row == {
        "step": 0, "attempt": 1, "overflow": False, "discarded": False, "loss_scale_before": 65536.0,
        "loss_scale_after": 65536.0, "loss": "NaN", "lr": 0.02, "grad_norm": 1.0, "update_norm": None,
        "momentum_norm": 0.5, "step_time_s": 0.01, "largest_parameter": 0, "nonfinite_parameters": 0, "ns_calls": 2,
        "tokens": 64,
    }  # fmt: skip


def _poisoned(client: httpx.Client, database: Database) -> Workers:
    voice = workers(client, database)
    kinds = [0.5, INF, NAN, NAN, 0.5, -INF]
    voice.steps(
        [
            step_record(step, momentum_norm=kind) if math.isfinite(kind) else discarded_record(step, momentum_norm=kind)
            for step, kind in enumerate(kinds)
        ]
    )
    return voice


def test_a_series_names_each_stretch_that_is_not_finite_and_each_discarded_one(
    client: httpx.Client, sqlite_database: Database
) -> None:
    voice = _poisoned(client, sqlite_database)
    answer = client.get(f"/runs/{voice.run_id}/steps", params={"max_points": 2, "fields": "momentum_norm"}).json()

    assert answer == {
        "series": {"step": list(range(6)), "momentum_norm": [0.5, "Infinity", "NaN", "NaN", 0.5, "-Infinity"]},
        "overflow_runs": [[1, 3], [5, 5]],
        "discarded_runs": [[1, 3], [5, 5]],
        "nonfinite_runs": {
            "momentum_norm": [
                {"first": 1, "last": 1, "value": "Infinity"},
                {"first": 2, "last": 3, "value": "NaN"},
                {"first": 5, "last": 5, "value": "-Infinity"},
            ]
        },
        "exact": True,
    }


def test_a_long_series_keeps_every_spike_and_every_discarded_step(
    client: httpx.Client, sqlite_database: Database
) -> None:
    voice = workers(client, sqlite_database, steps=25_000)
    odd = {7: 1e9, 12_345: -4.0, 24_999: 7e7}
    records = [
        discarded_record(step, loss=NAN) if step == 20_000 else step_record(step, loss=odd.get(step, 1.0))
        for step in range(25_000)
    ]
    for start in range(0, 25_000, 5000):
        assert voice.steps(records[start : start + 5000]).status_code == 200
    answer = client.get(f"/runs/{voice.run_id}/steps", params={"max_points": 1000, "fields": "loss"}).json()

    assert answer["exact"] is False
    assert len(answer["series"]["step"]) == len(answer["series"]["loss"]) == 1000
    assert set(odd.values()) < set(answer["series"]["loss"])
    assert answer["series"]["step"] == sorted(answer["series"]["step"])
    assert answer["discarded_runs"] == [[20_000, 20_000]]
    assert answer["nonfinite_runs"] == {"loss": [{"first": 20_000, "last": 20_000, "value": "NaN"}]}


def test_csv_gives_every_step_beyond_one_chunk(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database, steps=5100)
    voice.steps([step_record(step) for step in range(5100)])
    answer = client.get(f"/runs/{voice.run_id}/steps", params={"format": "csv", "start": 1})

    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert answer.headers["content-type"].startswith("text/csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 5100))


def test_a_parameters_norms_come_after_each_step(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.post("facts", {"parameters": PARAMETERS})
    voice.steps([step_record(0, parameter_norms=norms(55.1596, INF)), step_record(1, parameter_norms=b"")])

    def steps(index: int) -> Any:
        return client.get(f"/runs/{voice.run_id}/parameters/{index}/steps").json()["steps"]

    assert steps(0) == [
        {"step": 0, "momentum_norm": float(np.float32(55.1596))}, {"step": 1, "momentum_norm": None},
    ]  # fmt: skip
    assert [row["momentum_norm"] for row in steps(1)] == ["Infinity", None]
    assert client.get(f"/runs/{voice.run_id}/parameters/2/steps").status_code == 404


def test_one_parameters_norms_are_read_without_those_of_all_others(
    client: httpx.Client, sqlite_database: Database
) -> None:
    voice = workers(client, sqlite_database)
    voice.post("facts", {"parameters": PARAMETERS})
    packed = norms(1.0, 2.0) + bytes(80_000)
    insert(sqlite_database, voice.attempt_id, [step_record(step, parameter_norms=packed) for step in range(200)])

    tracemalloc.start()
    answer = client.get(f"/runs/{voice.run_id}/parameters/1/steps").json()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert answer["steps"] == [{"step": step, "momentum_norm": 2.0} for step in range(200)]
    assert most < 4_000_000


def test_one_parameters_chart_is_exact_where_it_is_short(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.post("facts", {"parameters": PARAMETERS})
    kinds = [0.5, INF, NAN, NAN, None, -INF]
    voice.steps(
        [
            step_record(step, parameter_norms=b"" if kind is None else norms(1.0, kind))
            for step, kind in enumerate(kinds)
        ]
    )

    answer = client.get(f"/runs/{voice.run_id}/parameters/1/steps", params={"max_points": 2}).json()

    assert answer == {
        "series": {"step": list(range(6)), "momentum_norm": [0.5, "Infinity", "NaN", "NaN", None, "-Infinity"]},
        "nonfinite_runs": {
            "momentum_norm": [
                {"first": 1, "last": 1, "value": "Infinity"},
                {"first": 2, "last": 3, "value": "NaN"},
                {"first": 5, "last": 5, "value": "-Infinity"},
            ]
        },
        "exact": True,
    }


def test_one_parameters_long_chart_keeps_every_spike_and_says_exactly_where_it_is_not_finite(
    client: httpx.Client, sqlite_database: Database
) -> None:
    voice = workers(client, sqlite_database, steps=25_000)
    voice.post("facts", {"parameters": PARAMETERS})
    odd = {7: 1e9, 12_345: -4.0, 20_000: NAN, 20_001: INF, 24_999: 7e7}
    for start in range(0, 25_000, 5000):
        voice.steps(
            [step_record(step, parameter_norms=norms(1.0, odd.get(step, 2.0))) for step in range(start, start + 5000)]
        )

    answer = client.get(f"/runs/{voice.run_id}/parameters/1/steps", params={"max_points": 1000}).json()

    assert answer["exact"] is False
    assert len(answer["series"]["step"]) == len(answer["series"]["momentum_norm"]) == 1000
    assert {1e9, -4.0, 7e7} < set(answer["series"]["momentum_norm"])
    assert answer["nonfinite_runs"]["momentum_norm"] == [
        {"first": 20_000, "last": 20_000, "value": "NaN"},
        {"first": 20_001, "last": 20_001, "value": "Infinity"},
    ]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/runs/none/steps", 404),
        ("/runs/none/steps?format=csv", 404),
        ("/runs/none/parameters", 404),
        ("/runs/{id}/steps?fields=colour", 422),
        ("/runs/{id}/steps?fields=,", 422),
        ("/runs/{id}/steps?limit=0", 422),
        ("/runs/{id}/steps?limit=10001", 422),
        ("/runs/{id}/steps?start=-1", 422),
        ("/runs/{id}/steps?start=99999999999999999999", 422),
        ("/runs/{id}/steps?max_points=1", 422),
        ("/runs/{id}/steps?format=xml", 422),
        ("/runs/{id}/parameters/-1/steps", 404),
        ("/runs/{id}/parameters/0/steps?max_points=1", 422),
        ("/runs/{id}/parameters/99999999999999999999/steps", 404),
    ],
)
def test_what_cannot_be_read_is_a_problem_document(
    client: httpx.Client, sqlite_database: Database, path: str, status: int
) -> None:
    voice = workers(client, sqlite_database)
    answer = client.get(path.format(id=voice.run_id))

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["remedy"]
