"""What is tried again, what is not, and what each failure becomes."""

from collections.abc import Callable

import httpx
import pytest

from muonscope.client import Client
from muonscope.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    ServiceError,
    ServiceFailed,
    ServiceUnreachable,
    Unauthorized,
    UnexpectedAnswer,
)
from tests.unit.client.fake_service import BrokenStream, FakeService, problem, run_json

BUSY = {"status": 503, "title": "A needed part is not available"}


def test_a_submission_cut_off_on_the_way_is_sent_again_with_the_same_key(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.failures = [httpx.ReadError("cut"), httpx.ReadTimeout("slow")]
    service.answers["POST", "/runs"] = run_json()

    client.runs.submit({})

    keys = {request.headers["Idempotency-Key"] for request in service.requests}
    assert len(service.requests) == 3
    assert len(keys) == 1


def test_pauses_grow_and_a_service_that_says_when_is_believed(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    later = problem(**BUSY)
    later.headers["Retry-After"] = "7"
    service.failures = [problem(**BUSY), problem(**BUSY), later]
    service.answers["GET", "/runs/r1"] = run_json()

    client.runs.get("r1")

    first, second, third = pauses
    assert 0.07 < first < 0.13
    assert 0.15 < second < 0.25
    assert third == 7.0


def test_a_service_cannot_ask_for_an_endless_pause(client: Client, service: FakeService, pauses: list[float]) -> None:
    later = problem(**BUSY)
    later.headers["Retry-After"] = "86400"
    service.failures = [later]
    service.answers["GET", "/runs/r1"] = run_json()

    client.runs.get("r1")

    assert pauses == [30.0]


@pytest.mark.parametrize("failure", [httpx.ReadError("cut"), problem(**BUSY)])
def test_a_call_that_must_not_happen_twice_is_not_sent_twice(
    failure: Exception | httpx.Response, client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.failures = [failure]
    service.answers["POST", "/runs/r1/retry"] = run_json()

    with pytest.raises((ServiceUnreachable, ServiceFailed)):
        client.runs.retry("r1")

    assert len(service.requests) == 1


def test_a_refused_connection_reached_nobody_and_so_anything_is_sent_again(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.failures = [httpx.ConnectError("refused")]
    service.answers["POST", "/runs/r1/retry"] = run_json()

    assert client.runs.retry("r1").id == "r1"


def test_tries_end(client: Client, service: FakeService, pauses: list[float]) -> None:
    service.failures = [httpx.ConnectError("Connection refused")] * 9

    with pytest.raises(ServiceUnreachable, match="no service answers at http://service") as caught:
        client.runs.get("r1")

    assert len(service.requests) == 4
    assert "muonscope up" in (caught.value.remedy or "")


def test_a_client_without_retries_tries_once(service: FakeService, pauses: list[float]) -> None:
    service.failures = [httpx.ConnectError("refused")]

    with pytest.raises(ServiceUnreachable):
        Client("http://service", transport=service.transport, retries=0).runs.get("r1")

    assert pauses == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, NotFound),
        (409, Conflict),
        (413, InvalidRequest),
        (422, InvalidRequest),
        (500, ServiceFailed),
    ],
)
def test_each_status_has_its_exception_and_none_of_these_is_tried_again(
    status: int, kind: type[ServiceError], client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.answers["POST", "/runs"] = problem(status, "no")

    with pytest.raises(kind) as caught:
        client.runs.submit({})

    assert type(caught.value) is kind
    assert caught.value.status == status
    assert len(service.requests) == 1


def test_a_problem_document_says_field_value_and_remedy(client: Client, service: FakeService) -> None:
    members = {"detail": "zero_stage must be 1, 2 or 3", "field": "zero_stage", "value": 7, "remedy": "choose 1"}
    service.answers["POST", "/runs"] = problem(422, "The input is not valid", **members)

    with pytest.raises(InvalidRequest, match="zero_stage must be 1, 2 or 3") as caught:
        client.runs.submit({"zero_stage": 7})

    assert (caught.value.field, caught.value.value, caught.value.remedy) == ("zero_stage", 7, "choose 1")


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="<html>nginx</html>"),
        httpx.Response(200, text="<html>hello</html>"),
        httpx.Response(200, json={"hello": "world"}),
        httpx.Response(200, json=["r1"]),
        httpx.Response(200, json=None),
        httpx.Response(302, headers={"Location": "/login"}),
    ],
)
def test_another_program_on_the_port_is_told_from_our_service(
    answer: httpx.Response, client: Client, service: FakeService
) -> None:
    service.answers["GET", "/runs/r1"] = answer

    with pytest.raises(UnexpectedAnswer, match="service/runs/r1"):
        client.runs.get("r1")


def test_a_proxy_without_its_service_is_a_failure_on_the_service_side(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.answers["GET", "/runs/r1"] = httpx.Response(502, text="Bad gateway")

    with pytest.raises(ServiceFailed, match="Bad gateway"):
        client.runs.get("r1")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8800", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    if not url:
        assert Client(url).url == "http://127.0.0.1:8800"
        return
    with pytest.raises(ServiceUnreachable, match="not an address"):
        Client(url)


@pytest.mark.parametrize("read", [Client.health, lambda client: list(client.runs.csv("r1"))])
def test_an_answer_that_does_not_unpack_is_none_of_our_service(
    client: Client, service: FakeService, read: Callable[[Client], object]
) -> None:
    garbled = httpx.Response(
        200, headers={"Content-Encoding": "gzip"}, stream=BrokenStream("not packed at all", cut=False)
    )
    service.answers = {("GET", path): garbled for path in ("/healthz", "/runs/r1/steps")}

    with pytest.raises(UnexpectedAnswer):
        read(client)
