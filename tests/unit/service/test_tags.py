"""Tags on runs that were accepted, and the counts above the run table."""

import pytest
from httpx import Client, Response


def submit(client: Client, **spec: object) -> str:
    return str(client.post("/runs", json={"steps": 3, **spec}).json()["id"])


def change(client: Client, run_id: str, **body: object) -> Response:
    return client.patch(f"/runs/{run_id}", json=body, headers={"Muonscope-User": "ann"})


def tag_events(client: Client, run_id: str) -> list[tuple[str, str]]:
    events = client.get(f"/runs/{run_id}/events", headers={"Accept": "application/json"}).json()["events"]
    return [(event["who"], event["why"]) for event in events if event["kind"] == "tags"]


def test_tags_are_added_and_removed_and_the_spec_stays_as_submitted(client: Client) -> None:
    run_id = submit(client, tags=["draft", "old"])

    run = change(client, run_id, add_tags=["night", "night"], remove_tags=["draft", "never there"]).json()

    assert run["tags"] == client.get(f"/runs/{run_id}").json()["tags"] == ["old", "night"]
    assert run["spec"]["tags"] == ["draft", "old"]
    assert [each["id"] for each in client.get("/runs?q=tag:night").json()["runs"]] == [run_id]
    assert client.get("/runs?q=tag:draft").json()["runs"] == []
    assert tag_events(client, run_id) == [("ann", "added night; removed draft")]


def test_the_same_change_twice_is_one_change_with_one_event(client: Client) -> None:
    run_id = submit(client)

    first, second = (change(client, run_id, add_tags=["night"]).json() for _ in range(2))

    assert first["tags"] == second["tags"] == ["night"]
    assert len(tag_events(client, run_id)) == 1


def test_a_run_that_has_ended_is_tagged_too(client: Client) -> None:
    run_id = submit(client, world_size=1)
    client.post(f"/runs/{run_id}/stop")

    assert change(client, run_id, add_tags=["dud"]).json()["tags"] == ["dud"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"add_tags": [" "]}, "add_tags[0]"),
        ({"add_tags": ["nul\x00"]}, "add_tags[0]"),
        ({"add_tags": ["x" * 201]}, "add_tags[0]"),
        ({"add_tags": [str(number) for number in range(64)]}, "add_tags"),
        ({"add_tags": ["a"], "remove_tags": ["a"]}, "remove_tags"),
        ({"tags": ["a"]}, "tags"),
        ({"name": "other"}, "name"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_by_field(shared: Client, body: dict[str, object], field: str) -> None:
    run_id = submit(shared, tags=["kept"])

    refused = change(shared, run_id, **body)

    assert (refused.status_code, refused.json()["field"]) == (422, field)
    assert refused.json()["remedy"]
    assert shared.get(f"/runs/{run_id}").json()["tags"] == ["kept"]


def test_a_run_that_is_not_there_cannot_be_tagged(shared: Client) -> None:
    assert change(shared, "nowhere", add_tags=["a"]).status_code == 404


def test_counts_are_of_the_runs_that_the_search_finds(client: Client) -> None:
    client.post("/queue/pause", json={})
    stopped = submit(client, name="one", tags=["a"])
    submit(client, name="two", tags=["a"])
    submit(client, name="three")
    client.post(f"/runs/{stopped}/stop")

    found, everything = (client.get("/runs/counts", params={"q": q}).json() for q in ("tag:a", ""))

    assert found["total"] == 2
    assert {status: count for status, count in found["statuses"].items() if count} == {"queued": 1, "stopped": 1}
    assert (everything["total"], everything["statuses"]["queued"], everything["verdicts"]["dies"]) == (3, 2, 0)


def test_counts_refuse_what_the_list_refuses(shared: Client) -> None:
    refused = shared.get("/runs/counts", params={"q": "colour:red"})

    assert (refused.status_code, refused.json()["field"]) == (422, "q")
