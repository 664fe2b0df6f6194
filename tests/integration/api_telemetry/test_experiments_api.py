import base64
import csv
import io
from typing import Any

import httpx
import numpy as np
import pytest

from service.store.runs import RunRepository
from service.store.session import Database
from tests.integration.api_telemetry.workers import Workers, die, train, workers
from tests.records import start_attempt


def _num_runs(database: Database) -> int:
    with database.read() as session:
        return len(RunRepository(session).list().runs)


def _voices(client: httpx.Client, database: Database, experiment: dict[str, Any]) -> list[Workers]:
    return [Workers(client, run["id"], start_attempt(database, run["id"])) for run in experiment["runs"]]


def test_a_matrix_queues_every_combination(any_client: httpx.Client, database: Database) -> None:
    asked = {
        "name": "scales", "base": {"steps": 7, "world_size": 2},
        "matrix": {"zero_stage": [1, 2], "loss_scale.initial_power": [4, 0], "step_ordering": ["master", "ordered"]},
    }  # fmt: skip
    created = any_client.post("/experiments", json=asked)
    experiment = created.json()

    assert created.status_code == 201
    assert created.headers["location"] == f"/experiments/{experiment['id']}"
    assert (experiment["name"], experiment["status"], len(experiment["runs"])) == ("scales", "queued", 8)
    assert experiment["table"]["columns"][:3] == ["stage", "initial scale", "ordering"]
    assert [row[:3] for row in experiment["table"]["rows"]][:3] == [
        [1, 16, "master"], [1, 16, "ordered"], [1, 1, "master"],
    ]  # fmt: skip
    assert any_client.get(f"/experiments/{experiment['id']}").json() == experiment
    assert [each["id"] for each in any_client.get("/experiments").json()["experiments"]] == [experiment["id"]]


def test_thirty_step_is_held_against_the_published_table(client: httpx.Client, sqlite_database: Database) -> None:
    experiment = client.post("/experiments", json={"builtin": "thirty-step"}).json()
    assert len(experiment["runs"]) == 8
    for run, voice in zip(experiment["runs"], _voices(client, sqlite_database, experiment), strict=True):
        spec = run["spec"]
        if spec["step_ordering"] == "master" and spec["loss_scale"]["initial_power"] == 16:
            die(voice)
        else:
            train(voice)
    answer = client.get(f"/experiments/{experiment['id']}").json()

    table = answer["table"]
    assert answer["status"] == "succeeded"
    assert table["columns"] == [
        "stage", "initial scale", "ordering", "moved", "momentum finite", "outcome", "overflows", "final scale",
        "largest weight motion", "measured", "published figure",
    ]  # fmt: skip
    assert table["rows"][0] == [
        1, 65536, "master", "0/2", False, "dies at step 17", 17, 1, 0.0,
        "dies at step 17, 0/2 moved, 17 overflows", "dies at step 17, 0/10 moved, 17 overflows",
    ]  # fmt: skip
    assert table["rows"][1] == [
        1, 65536, "ordered", "2/2", True, "trains", 0, 65536, 0.45,
        "trains, 2/2 moved, 0 overflows", "trains, 10/10 moved",
    ]  # fmt: skip
    # These made-up runs have two parameters, not ten: the check must notice, and nothing else.
    assert [check["matches"] for check in table["published"]] == [False] * 8
    assert table["published"][1]["differences"] == [
        "parameters moved is 2, published 10", "parameters is 2, published 10",
    ]  # fmt: skip


def test_the_table_comes_as_markdown_and_csv(client: httpx.Client, sqlite_database: Database) -> None:
    asked = {"name": "=cmd|x", "base": {"steps": 30}, "matrix": {"name": ["=a|b", "<img>"]}}
    experiment = client.post("/experiments", json=asked).json()
    markdown = client.get(f"/experiments/{experiment['id']}.md")
    table = client.get(f"/experiments/{experiment['id']}.csv")

    assert markdown.headers["content-type"].startswith("text/markdown")
    assert "| =a\\|b |" in markdown.text
    assert "\\<img\\>" in markdown.text
    rows = list(csv.reader(io.StringIO(table.text)))
    assert rows[0][:2] == ["run", "name"]
    assert [row[1] for row in rows[1:]] == ["'=a|b", "<img>"]


def test_byte_gpt_takes_a_text(client: httpx.Client) -> None:
    experiment = client.post("/experiments", json={"builtin": "byte-gpt", "text": "/books"}).json()

    assert {run["spec"]["task"]["text"] for run in experiment["runs"]} == {"/books"}
    assert {run["spec"]["step_ordering"] for run in experiment["runs"]} == {"master", "ordered"}


def test_byte_gpt_shows_its_loss_falling_and_claims_no_published_figure(
    client: httpx.Client, sqlite_database: Database
) -> None:
    experiment = client.post("/experiments", json={"builtin": "byte-gpt"}).json()
    for voice in _voices(client, sqlite_database, experiment):
        train(voice, steps=60)
    table = client.get(f"/experiments/{experiment['id']}").json()["table"]

    assert table["columns"][-4:] == ["first loss", "last loss", "measured", "expected figure"]
    assert [row[-4:-2] for row in table["rows"]] == [[3.0, pytest.approx(2.41)]] * 4
    assert table["check_label"] == "expected"


def test_calm_boom_shows_both_momenta_beside_the_published_ones(
    client: httpx.Client, sqlite_database: Database
) -> None:
    experiment = client.post("/experiments", json={"builtin": "calm-boom"}).json()
    for voice in _voices(client, sqlite_database, experiment):
        train(voice, steps=4)
    table = client.get(f"/experiments/{experiment['id']}").json()["table"]

    assert table["columns"][:2] == ["implementation", "ordering"]
    assert table["columns"][-2:] == ["measured", "published figure"]
    assert table["rows"][0][-1] == "calm 55.1596 → 104.8011 → 149.4872; boom 42.7804 → inf → nan"
    # These made-up runs record other norms.
    assert table["rows"][0][-2].startswith("calm ")
    assert not any(check["matches"] for check in table["published"])


def test_weights_that_are_kept_for_distances_are_not_shown(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    train(voice, weights=base64.b64encode(np.ones(20, "<f4").tobytes()).decode())

    (attempt,) = voice.run()["attempts"]
    assert attempt["final"]["parameters_moved"] == 2
    assert "weights" not in attempt["final"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({}, "name"),
        ({"name": " "}, "name"),
        ({"builtin": "none"}, "builtin"),
        ({"builtin": "thirty-step", "text": "/x"}, "text"),
        ({"builtin": "byte-gpt", "text": 3}, "text"),
        ({"builtin": "thirty-step", "matrix": {"seed": [1]}}, "builtin"),
        ({"name": "x", "colour": "red"}, "colour"),
        ({"name": "x", "matrix": {"zero_stage": []}}, "matrix.zero_stage"),
        ({"name": "x", "matrix": {"zero_stage": [1, 1]}}, "matrix.zero_stage"),
        ({"name": "x", "matrix": {"zero_stage": [1, 7]}}, "zero_stage"),
        ({"name": "x", "matrix": {"steps.more": [1]}, "base": {"steps": 3}}, "matrix.steps.more"),
        ({"name": "x", "matrix": {"colour": ["red"]}}, "colour"),
        ({"name": "x", "matrix": {"world_size": [9]}}, "world_size"),
        ({"name": "x", "matrix": {"seed": list(range(40)), "steps": list(range(1, 40))}}, "matrix"),
        ({"name": "x", "matrix": {"seed": 1}}, "matrix.seed"),
    ],
)
def test_an_experiment_that_cannot_be_is_refused_and_nothing_is_queued(
    client: httpx.Client, sqlite_database: Database, asked: dict[str, Any], field: str
) -> None:
    answer = client.post("/experiments", json=asked)

    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert answer.json()["remedy"]
    assert _num_runs(sqlite_database) == 0


def test_an_unknown_experiment_is_not_found(client: httpx.Client) -> None:
    for suffix in ("", ".md", ".csv"):
        assert client.get(f"/experiments/none{suffix}").status_code == 404


def test_experiments_are_listed_in_pages(client: httpx.Client) -> None:
    for index in range(3):
        client.post("/experiments", json={"name": str(index), "base": {}, "matrix": {"seed": [index]}})
    first = client.get("/experiments", params={"limit": 2}).json()
    second = client.get("/experiments", params={"limit": 2, "cursor": first["next_cursor"]}).json()

    assert [each["name"] for each in first["experiments"] + second["experiments"]] == ["2", "1", "0"]
    assert second["next_cursor"] is None
