"""Server-sent events, and going on after a break."""

import itertools
import json
import time
from types import SimpleNamespace

import httpx
import pytest

from muonscope.client import Client, sync_client
from muonscope.client.streams import EventDecoder, LineSplitter, Patience
from muonscope.errors import NotFound, ServiceUnreachable
from tests.unit.client.fake_service import TRAINED, BrokenStream, FakeService, problem, run_json

NO_HISTORY: dict[str, list[object]] = {"events": []}
STREAM = {"Content-Type": "text/event-stream"}


def stream(text: str, *, cut: bool) -> httpx.Response:
    return httpx.Response(200, headers=STREAM, stream=BrokenStream(text, cut=cut))


def test_an_event_is_its_lines_until_the_blank_one() -> None:
    decoder = EventDecoder()
    lines = [": hello", "id: 7", "event: run", 'data: {"a":', "data: 1}", "", "data:plain text", ""]

    events = [event for line in lines if (event := decoder.feed(line)) is not None]

    assert [(event.id, event.event, event.data) for event in events] == [
        ("7", "run", {"a": 1}),
        ("7", "message", "plain text"),
    ]


def test_a_blank_line_without_data_is_no_event() -> None:
    decoder = EventDecoder()

    assert [decoder.feed(line) for line in ("event: run", "", "")] == [None, None, None]


def test_a_cut_stream_goes_on_after_the_last_event_seen(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.answers["GET", "/runs/r1/events"] = [
        stream("id: 1\ndata: 1\n\nid: 2\ndata: 2\n\n", cut=True),
        stream("id: 3\ndata: 3\n\n", cut=False),
        NO_HISTORY,
    ]
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)

    assert [event.data for event in client.runs.events("r1")] == [1, 2, 3]

    streams = [request for request in service.requests if request.headers["Accept"] == "text/event-stream"]
    assert [request.headers.get("Last-Event-ID") for request in streams] == [None, "2"]


def test_a_stream_that_ends_before_its_run_is_taken_up_again(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.answers["GET", "/runs/r1/events"] = [
        stream("data: 1\n\n", cut=False),
        stream("data: 2\n\n", cut=False),
        NO_HISTORY,
    ]
    service.answers["GET", "/runs/r1"] = [run_json(status="running"), run_json(**TRAINED)]

    assert [event.data for event in client.runs.events("r1")] == [1, 2]


def test_a_runs_stream_ends_with_the_run_and_the_rest_of_its_history(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    """The service keeps the stream open for a retry: whoever follows a run would wait for ever."""
    text = (
        'event: event\nid: 7.3\ndata: {"id": 3}\n\n'
        'event: run\nid: 9.3\ndata: {"status": "failed"}\n\n'
        'event: event\nid: 9.4\ndata: {"id": 4}\n\n'
    )
    service.answers["GET", "/runs/r1/events"] = [
        stream(text, cut=False),
        httpx.Response(200, json={"events": [{"id": 4, "kind": "status", "to_status": "failed"}]}),
    ]

    events = list(client.runs.events("r1"))

    assert [event.data.get("id", event.event) for event in events] == [3, "run", 4]
    assert service.requests[-1].url.params["after"] == "3"
    assert pauses == []


def test_the_stream_of_all_runs_does_not_end_with_one_of_them(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    text = 'event: run\nid: 1\ndata: {"status": "failed"}\n\nevent: run\nid: 2\ndata: {"status": "queued"}\n\n'
    service.answers["GET", "/events"] = [stream(text, cut=True), problem(404, "enough")]

    with pytest.raises(NotFound):
        list(client.events())

    assert service.requests[-1].headers["Last-Event-ID"] == "2"


def test_a_stream_of_nothing_known_is_an_error_at_once(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    with pytest.raises(NotFound):
        list(client.runs.events("r1"))

    assert pauses == []


def test_patience_ends(client: Client, service: FakeService, pauses: list[float]) -> None:
    service.answers["GET", "/events"] = problem(503, "away")

    with pytest.raises(Exception, match="away"):
        list(client.events(patience_s=0.0))


def test_patience_counts_from_the_first_break_and_starts_anew_after_an_answer() -> None:
    patience = Patience(10.0)

    assert patience.decide_pause(now=100.0) == 0.2
    assert patience.decide_pause(now=109.0) == 0.4
    assert patience.decide_pause(now=110.0) is None
    patience.note_answer()
    assert patience.decide_pause(now=200.0) == 0.2


def test_pauses_between_connections_stay_short() -> None:
    patience = Patience(1000.0)

    assert max(patience.decide_pause(now=0.0) or 0.0 for _ in range(20)) == 5.0


def test_a_watched_run_is_given_at_each_change_until_it_is_finished(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    running = run_json(status="running")
    service.answers["GET", "/runs/r1"] = [run_json(), running, running, run_json(**TRAINED)]

    statuses = [run.status for run in client.runs.watch("r1")]

    assert statuses == ["queued", "running", "succeeded"]


def test_a_watch_outlives_a_restart_of_the_service(client: Client, service: FakeService, pauses: list[float]) -> None:
    away: list[Exception | httpx.Response] = [httpx.ConnectError("refused")] * 12
    service.failures = away
    service.answers["GET", "/runs/r1"] = run_json(**TRAINED)

    assert [run.status for run in client.runs.watch("r1")] == ["succeeded"]


def test_a_watch_without_patience_ends_with_the_reason(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    service.failures = [httpx.ConnectError("refused")] * 12

    with pytest.raises(ServiceUnreachable):
        list(client.runs.watch("r1", patience_s=0.0))


def test_a_watched_run_whose_loss_is_not_a_number_is_given_once(
    client: Client, service: FakeService, pauses: list[float]
) -> None:
    running = run_json(status="running", summary={"steps": 3, "last_loss": "NaN"})
    service.answers["GET", "/runs/r1"] = [running, running, running, run_json(**TRAINED)]

    statuses = [run.status for run in client.runs.watch("r1")]

    assert statuses == ["running", "succeeded"]


# By code points: they are not to be seen.
@pytest.mark.parametrize("separator", [chr(0x2028), chr(0x85)])
def test_a_name_that_holds_a_line_separator_of_unicode_does_not_tear_its_event(
    client: Client, service: FakeService, pauses: list[float], separator: str
) -> None:
    name = f"two{separator}lines"
    data = json.dumps(run_json(name=name, **TRAINED), ensure_ascii=False)
    service.answers["GET", "/runs/r1/events"] = [
        stream(f"event: run\nid: 1.0\ndata: {data}\n\n", cut=False),
        httpx.Response(200, json=NO_HISTORY),
    ]

    (event,) = client.runs.events("r1")

    assert event.data["name"] == name
    assert event.ends_a_run


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_end_where_the_standard_has_them_end_in_pieces_of_any_size(size: int) -> None:
    splitter, text = LineSplitter(), "a\nb\rc\r\n\r\n\n\rd\n"

    pieces = (text[start : start + size] for start in range(0, len(text), size))

    assert [line for piece in pieces for line in splitter.feed(piece)] == ["a", "b", "c", "", "", "", "d"]


@pytest.mark.parametrize("sign", [": still here\n\n", ""])
def test_a_quiet_stream_that_breaks_now_and_then_is_no_service_that_is_away(
    client: Client, service: FakeService, pauses: list[float], sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 45.0)
    # The client's own look at the clock alone: other loops of this process go by it too.
    monkeypatch.setattr(sync_client, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    end = f"event: run\nid: 9\ndata: {json.dumps(run_json(**TRAINED))}\n\n"
    service.answers["GET", "/events"] = [
        *(stream(f"retry: 1\n\n{sign}", cut=True) for _ in range(4)),
        stream(end, cut=False),
    ]

    events = client.events(patience_s=60.0)

    if sign:
        assert next(events).ends_a_run
    else:
        # The counter-test: a service that cuts every stream at once is given up.
        with pytest.raises(ServiceUnreachable):
            next(events)
