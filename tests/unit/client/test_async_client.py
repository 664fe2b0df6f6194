"""The asynchronous client: the same face, the same rules."""

import asyncio
import inspect
import json

import httpx
import pytest

from muonscope.client import AsyncClient, Client
from muonscope.client.async_client import AsyncAlerts, AsyncExperiments, AsyncRuns
from muonscope.client.sync_client import Alerts, Experiments, Runs
from muonscope.errors import InvalidRequest
from tests.unit.client.fake_service import TRAINED, FakeService, problem, run_json


def public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("one", "other"), [(Client, AsyncClient), (Runs, AsyncRuns), (Experiments, AsyncExperiments), (Alerts, AsyncAlerts)]
)
def test_both_clients_have_the_same_methods_with_the_same_parameters(one: type, other: type) -> None:
    def parameters(kind: type) -> dict[str, list[str]]:
        return {name: [str(each) for each in signature.parameters.values()] for name, signature in public(kind).items()}

    assert parameters(one) == parameters(other)


def test_it_submits_watches_and_lists(service: FakeService, pauses: list[float]) -> None:
    service.answers["POST", "/runs"] = run_json()
    service.answers["GET", "/runs/r1"] = [run_json(), run_json(status="running"), run_json(**TRAINED)]
    service.answers["GET", "/runs"] = {"runs": [run_json()], "next_cursor": None}

    async def use() -> tuple[list[str], list[str]]:
        async with AsyncClient("http://service", transport=service.transport) as client:
            run = await client.runs.submit({})
            statuses = [state.status async for state in client.runs.watch(run.id)]
            return [str(status) for status in statuses], [each.id async for each in client.runs.list()]

    assert asyncio.run(use()) == (["queued", "running", "succeeded"], ["r1"])


def test_it_retries_by_the_same_rule(service: FakeService, pauses: list[float]) -> None:
    service.failures = [httpx.ReadError("cut"), problem(503, "busy")]
    service.answers["POST", "/runs"] = run_json()

    async def submit() -> str:
        async with AsyncClient("http://service", transport=service.transport) as client:
            return (await client.runs.submit({})).id

    assert asyncio.run(submit()) == "r1"
    assert len({request.headers["Idempotency-Key"] for request in service.requests}) == 1
    assert len(pauses) == 2


def test_it_raises_the_same_errors(service: FakeService) -> None:
    service.answers["POST", "/runs"] = problem(422, "no", field="steps", value=-1, remedy="give 1 or more")

    async def submit() -> None:
        async with AsyncClient("http://service", transport=service.transport) as client:
            await client.runs.submit({"steps": -1})

    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(submit())
    assert caught.value.field == "steps"


def test_it_takes_a_stream_up_where_it_broke(service: FakeService, pauses: list[float]) -> None:
    def cut(text: str) -> httpx.Response:
        class Stream(httpx.AsyncByteStream):
            async def __aiter__(self):  # type: ignore[no-untyped-def]
                yield text.encode()
                raise httpx.ReadError("cut")

        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Stream())

    service.answers["GET", "/runs/r1/events"] = [
        cut("id: 4\ndata: 4\n\n"),
        httpx.Response(200, text="id: 5\ndata: 5\n\n", headers={"Content-Type": "text/event-stream"}),
        {"events": [{"id": 6}]},
    ]
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)

    async def follow() -> list[object]:
        async with AsyncClient("http://service", transport=service.transport) as client:
            return [event.data async for event in client.runs.events("r1")]

    assert asyncio.run(follow())[:2] == [4, 5]
    assert service.requests[1].headers["Last-Event-ID"] == "4"


def test_watching_and_streaming_read_what_the_other_client_reads() -> None:
    service, name = FakeService(), f"two{chr(0x2028)}lines"
    running = run_json(status="running", summary={"steps": 3, "last_loss": "NaN"})
    service.answers["GET", "/runs/r1"] = [running, running, run_json(**TRAINED)]
    data = json.dumps(run_json(name=name, **TRAINED), ensure_ascii=False)
    events = httpx.Response(200, text=f"event: run\nid: 1.0\ndata: {data}\n\n")
    service.answers["GET", "/runs/r1/events"] = [events, httpx.Response(200, json={"events": []})]

    async def use() -> tuple[list[str], list[str]]:
        async with AsyncClient("http://service", transport=service.transport) as client:
            watched = [str(state.status) async for state in client.runs.watch("r1", every_s=0.0)]
            return watched, [event.data["name"] async for event in client.runs.events("r1")]

    assert asyncio.run(use()) == (["running", "succeeded"], [name])
