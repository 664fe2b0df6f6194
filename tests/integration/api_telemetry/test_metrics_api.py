"""GET /metrics says what the store holds, as Prometheus reads it; the Grafana dashboard asks for nothing else."""

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.store.session import Database
from tests.integration.api_telemetry.workers import INF, NAN, die, train, workers
from tests.records import discarded_record, queue_run, spec, step_record

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "muonscope.json"


def _read(client: httpx.Client) -> dict[str, dict[tuple[str, ...], float]]:
    """Read the exposition with Prometheus's own parser: family -> label values -> value."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(answer.text)
    }


def test_the_counts_are_those_of_the_store(any_client: httpx.Client, database: Database) -> None:
    train(workers(any_client, database))
    die(workers(any_client, database))
    queue_run(database)

    found = _read(any_client)

    assert found["muonscope_runs"] == {
        ("queued",): 1, ("pending",): 0, ("running",): 0, ("succeeded",): 1, ("failed",): 1, ("stopped",): 0,
    }  # fmt: skip
    assert {verdict for verdict, count in found["muonscope_verdicts"].items() if count} == {
        ("dies",),
        ("inconclusive",),
    }
    assert found["muonscope_attempts"][("succeeded",)] == 1
    assert found["muonscope_steps_stored"] == {(): 47}
    assert found["muonscope_database_bytes"][()] > 4096
    assert found["muonscope_gpus"] == {(): 8}


def test_a_live_runs_newest_values_are_shown_whatever_their_kind(
    client: httpx.Client, sqlite_database: Database
) -> None:
    name = 'a "quoted" \\ name'
    voice = workers(client, sqlite_database, name=name)
    voice.steps([step_record(0), discarded_record(1, loss=None, momentum_norm=INF, loss_scale_after=NAN)])
    voice.steps([step_record(4, loss=None, momentum_norm=INF, loss_scale_after=NAN)])

    found = _read(client)

    labels = (voice.run_id, name, "ordered")
    assert found["muonscope_run_steps"] == {labels: 3}
    assert found["muonscope_run_discarded"] == found["muonscope_run_overflows"] == {labels: 1}
    assert found["muonscope_run_momentum_norm"] == {labels: INF}
    assert found["muonscope_run_loss_scale"][labels] != found["muonscope_run_loss_scale"][labels]
    assert found["muonscope_run_loss"] == {labels: 2.0}
    assert found["muonscope_gaps"] == {(): 1}


def test_what_was_not_measured_is_left_out(client: httpx.Client, sqlite_database: Database) -> None:
    workers(client, sqlite_database, **spec().model_dump(include={"name"}))

    assert _read(client)["muonscope_run_loss"] == {}


def test_the_dashboard_asks_for_what_is_there(client: httpx.Client, sqlite_database: Database) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"muonscope_\w+", target["expr"])
    }

    assert asked == set(_read(client))
