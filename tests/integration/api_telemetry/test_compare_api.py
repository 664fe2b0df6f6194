import httpx

from service.store.session import Database
from tests.integration.api_telemetry.application import FakeController
from tests.integration.api_telemetry.workers import INF, MOVED, PARAMETERS, die, next_workers, train, workers
from tests.records import discarded_record, norms, step_record

FACTS = {"parameters": PARAMETERS, "momentum_unit": "unscaled", "data_hash": "d", "initial_parameters_hash": "i"}


def test_a_pair_is_equal_to_the_last_bit_until_the_first_overflow(any_client: httpx.Client, database: Database) -> None:
    ordered = workers(any_client, database, steps=3)
    master = workers(any_client, database, steps=3, step_ordering="master")
    for voice, after in ((ordered, 0.4), (master, INF)):
        voice.post("facts", FACTS)
        poisoned = {"momentum_norm": 0.5 if after != INF else INF, "parameter_norms": norms(0.3, after)}
        voice.steps([step_record(0), discarded_record(1, **poisoned), step_record(2, **poisoned)])
        voice.outcome("succeeded", 3, final=MOVED)
    answer = any_client.get("/compare", params={"a": master.run_id, "b": ordered.run_id}).json()

    assert answer["spec_difference"] == [{"field": "step_ordering", "a": "master", "b": "ordered"}]
    assert answer["is_pair"] is True
    names = {
        side: any_client.get(f"/runs/{voice.run_id}").json()["name"] for side, voice in (("a", master), ("b", ordered))
    }
    assert answer["names"] == names
    assert answer["shared"] == {"data": True, "initial_parameters": True}
    assert answer["bit_equal_until"] == 1
    assert answer["first_divergence"] == {
        "step": 1, "scalar": "momentum_norm", "scalars": ["momentum_norm"], "a": "Infinity", "b": 0.5,
        "parameter": "layers.0.bias", "parameters_differing": 1,
    }  # fmt: skip
    assert answer["routes"] == {"num_differing": 0, "differing": []}
    assert "both overflowed" in answer["explanation"]
    assert (answer["discarded"]["a"], answer["discarded"]["b"], answer["discarded"]["both"]) == (1, 1, 1)


def test_a_parameter_that_not_the_same_optimizer_takes_is_named(any_client: httpx.Client, database: Database) -> None:
    ours, stock, silent = (workers(any_client, database, steps=1) for _ in range(3))
    ours.post("facts", FACTS)
    first, *rest = PARAMETERS
    other = {"muon": "adamw", "adamw": "muon"}[first["route"]]
    stock.post("facts", {**FACTS, "parameters": [{**first, "route": other}, *rest]})

    answer, unknown = (
        any_client.get("/compare", params={"a": ours.run_id, "b": voice.run_id}).json() for voice in (stock, silent)
    )

    assert answer["routes"] == {
        "num_differing": 1,
        "differing": [{"parameter": first["name"], "a": first["route"], "b": other}],
    }
    assert unknown["routes"] is None


def test_a_death_and_a_success_are_told_apart_in_scale_final_state_and_cost(
    client: httpx.Client, sqlite_database: Database
) -> None:
    dead = workers(client, sqlite_database, steps=30, step_ordering="master")
    alive = workers(client, sqlite_database, steps=30)
    die(dead)
    train(alive)
    answer = client.get("/compare", params={"a": dead.run_id, "b": alive.run_id}).json()

    assert (answer["discarded"]["a"], answer["discarded"]["a_runs"], answer["discarded"]["b"]) == (17, [[0, 16]], 0)
    scale = answer["loss_scale"]["a"]
    assert (scale["initial"], scale["final"], scale["num_changes"]) == (65536.0, 1.0, 16)
    assert answer["final"]["parameters_moved"] == {"a": 0.0, "b": 2.0, "difference": 2.0}
    assert answer["final"]["momentum_norm"]["a"] == "NaN"
    assert answer["cost"]["peak_memory_bytes"]["ratio"] == 1.0


def test_equal_runs_have_no_divergence(client: httpx.Client, sqlite_database: Database) -> None:
    voices = [workers(client, sqlite_database, steps=30) for _ in range(2)]
    for voice in voices:
        train(voice)
    answer = client.get("/compare", params={"a": voices[0].run_id, "b": voices[1].run_id}).json()

    assert (answer["spec_difference"], answer["first_divergence"], answer["bit_equal_until"]) == ([], None, 30)
    assert answer["final"]["parameters_equal"] is True


def test_runs_without_steps_can_be_compared_and_unknown_ones_cannot(
    client: httpx.Client, sqlite_database: Database
) -> None:
    voice = workers(client, sqlite_database)
    assert client.get("/compare", params={"a": voice.run_id, "b": voice.run_id}).json()["bit_equal_until"] is None
    assert client.get("/compare", params={"a": voice.run_id, "b": "none"}).status_code == 404
    assert client.get("/compare", params={"a": voice.run_id}).status_code == 422


def test_a_resumed_run_is_held_by_what_its_newest_attempt_came_to_and_by_what_it_said(
    client: httpx.Client, sqlite_database: Database, controller: FakeController
) -> None:
    controller.max_attempts = 3
    whole, resumed = (workers(client, sqlite_database, steps=30) for _ in range(2))
    train(whole)
    resumed.post("facts", FACTS)
    resumed.steps([step_record(step, loss=9.0 if step > 5 else 3.0 - step / 100) for step in range(9)])
    resumed.outcome("failed", 9, failure={"kind": "worker_died", "message": "a node is gone"})
    second = next_workers(resumed, sqlite_database, first_step=4)
    second.post("facts", FACTS)
    second.steps([step_record(step, loss=3.0 - step / 100) for step in (4, 5)])
    second.outcome("failed", 2, failure={"kind": "worker_died", "message": "a node is gone"})
    next_workers(second, sqlite_database, first_step=4).outcome(
        "failed", 0, failure={"kind": "setup_failed", "message": "no room"}
    )

    answer = client.get("/compare", params={"a": whole.run_id, "b": resumed.run_id}).json()

    assert answer["shared"] == {"data": True, "initial_parameters": True}
    assert answer["not_compared"] == []
    assert (answer["bit_equal_until"], answer["first_divergence"]) == (6, None)
    assert (answer["final"]["steps"], answer["final"]["loss"]["b"]) == ({"a": 30, "b": 6}, 2.95)
