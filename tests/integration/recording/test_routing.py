"""Which parameters Muon takes, as the API says of DeepSpeed's own: models that surprised people."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.distributed.gang import Gang
from tests.integration.recording import loops
from tests.integration.recording.test_recording import ended

Gangs = Callable[[int], Gang]


def _recorded(gang: Gangs, service: httpx.Client, **model: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The run and the route of each parameter by name."""
    (run_id,) = gang(1).run(loops.named, record={"url": str(service.base_url)}, **model)
    parameters = service.get(f"/runs/{run_id}/parameters").json()["parameters"]
    return ended(service, run_id), {each["name"]: each["route"] for each in parameters}


def test_a_muon_without_a_parameter_says_so_and_has_no_momentum(gang: Gangs, service: httpx.Client) -> None:
    run, routes = _recorded(gang, service, shapes={"bias": (8,), "scale": (4,)})

    assert set(routes.values()) == {"adamw"}
    assert run["summary"]["muon_parameters_total"] == 0
    assert [finding["name"] for finding in run["findings"]] == ["trains", "no_muon"]
    steps = service.get(f"/runs/{run['id']}/steps").json()["steps"]
    assert [step["momentum_norm"] for step in steps] == [None] * 3


@pytest.mark.parametrize(
    ("frozen", "routes", "moved"),
    [("w", {"w": "frozen", "b": "adamw"}, (1, 1, 0)), ("b", {"w": "muon", "b": "frozen"}, (1, 1, 1))],
)
def test_half_a_model_trains_under_the_half_of_the_optimizer_that_has_it(
    gang: Gangs, service: httpx.Client, frozen: str, routes: dict[str, str], moved: tuple[int, int, int]
) -> None:
    run, found = _recorded(gang, service, shapes={"w": (8, 8), "b": (8,)}, frozen=(frozen,))

    summary = run["summary"]
    assert (run["verdict"]["name"], found) == ("trains", routes)
    counted = (summary["parameters_moved"], summary["parameters_total"], summary["muon_parameters_moved"])
    assert counted == moved


def test_parameters_of_more_than_two_dimensions_are_batches_under_muon(gang: Gangs, service: httpx.Client) -> None:
    run, routes = _recorded(gang, service, shapes={"w": (8, 8), "scale": (6, 1, 1), "stack": (3, 4, 4)})

    assert routes == dict.fromkeys(("w", "scale", "stack"), "muon")
    assert (run["verdict"]["name"], run["summary"]["muon_parameters_moved"]) == ("trains", 3)
    steps = service.get(f"/runs/{run['id']}/steps").json()["steps"]
    assert all(isinstance(step["momentum_norm"], float) for step in steps)


def test_embeddings_and_heads_are_known_by_their_names_alone(gang: Gangs, service: httpx.Client) -> None:
    names = ("tok_embed", "lm_head", "wte", "head")
    _, routes = _recorded(gang, service, shapes=dict.fromkeys(names, (10, 8)))

    assert routes == {"tok_embed": "adamw", "lm_head": "adamw", "wte": "muon", "head": "muon"}
