"""Events: what happened, as JSON, and live as server-sent events that resume where they broke off.

GET /events             event `run`, id = revision: each changed run, in its newest state
GET /runs/{id}/events   event `run` and event `event` (a status change, an alarm), id = revision.event
"""

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Final

from fastapi import Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from service.api.dependencies import DatabaseDependency, SettingsDependency
from service.api.feed import Change, ChangeFeed
from service.api.responses import Router, StrictJSONResponse, dumps
from service.api.runs import RunId
from service.api.schemas import PROBLEMS, EventOut, EventsOut, present_event
from service.errors import NotFound, Unavailable
from service.settings import Settings
from service.store.events import EventRepository
from service.store.runs import RunRepository
from service.store.session import Database

router = Router(tags=["events"], responses=PROBLEMS)

_KEEPALIVE_S: Final = 15.0
_EVENT_STREAM: Final = "text/event-stream"
_PLACE: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?")
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
LastEventId = Annotated[str | None, Header(description="The last id seen: the stream goes on after it.")]


async def get_feed(request: Request) -> ChangeFeed:
    feed: ChangeFeed = request.app.state.feed
    return feed


FeedDependency = Annotated[ChangeFeed, Depends(get_feed)]


@router.get("/events", response_class=StreamingResponse)
async def stream_runs(
    feed: FeedDependency, settings: SettingsDependency, last_event_id: LastEventId = None
) -> StreamingResponse:
    """Stream every run that changes, in its newest state, as event `run`."""
    _admit(feed, settings)
    newest = await run_in_threadpool(feed.last_revision)
    revision, _ = _read_place(last_event_id, newest)
    if revision > newest:
        # A place in another store, or in this one before it was emptied: all that is here is new there.
        revision = 0
    return StreamingResponse(_all_runs(feed, revision), media_type=_EVENT_STREAM, headers=_HEADERS)


@router.get("/runs/{run_id}/events", response_model=EventsOut)
async def read_events(
    run_id: RunId,
    request: Request,
    database: DatabaseDependency,
    feed: FeedDependency,
    settings: SettingsDependency,
    after: Annotated[int, Query(ge=0, lt=2**62, description="Only events after this id.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    last_event_id: LastEventId = None,
) -> Response:
    """List what happened to a run; with `Accept: text/event-stream`, follow it live."""
    if _EVENT_STREAM not in request.headers.get("accept", ""):
        events = await run_in_threadpool(_events_after, database, run_id, after, limit)
        return StrictJSONResponse(EventsOut(events=events).model_dump(mode="json"))
    first = await run_in_threadpool(feed.read_run, run_id)
    _admit(feed, settings)
    place = _read_place(last_event_id, -1)
    if place[0] > first.revision:
        # No place in this run's history: it is told from the beginning.
        place = -1, 0
    return StreamingResponse(_one_run(feed, database, first, place), media_type=_EVENT_STREAM, headers=_HEADERS)


def _admit(feed: ChangeFeed, settings: Settings) -> None:
    if feed.num_readers >= settings.max_streams:
        raise Unavailable(
            f"{settings.max_streams} live streams are open already", remedy="close some, or read without streaming"
        )


def _read_place(last_event_id: str | None, default: int) -> tuple[int, int]:
    matched = _PLACE.fullmatch((last_event_id or "").strip())
    if matched is None:
        return default, 0
    return int(matched[1]), int(matched[2] or 0)


async def _all_runs(feed: ChangeFeed, revision: int) -> AsyncIterator[bytes]:
    era = feed.era
    feed.enter()
    try:
        yield b"retry: 1000\n\n"
        while not feed.is_closed:
            if feed.era != era:
                era, revision = feed.era, 0
            if not await feed.wait(revision, _KEEPALIVE_S):
                yield b": still here\n\n"
                continue
            for change in await feed.after(revision):
                revision = change.revision
                yield _frame("run", str(revision), change.data)
    finally:
        feed.leave()


async def _one_run(feed: ChangeFeed, database: Database, first: Change, place: tuple[int, int]) -> AsyncIterator[bytes]:
    revision, event_id = place
    change: Change | None = first if first.revision > revision else None
    seen = first.revision
    feed.enter()
    try:
        yield b"retry: 1000\n\n"
        while not feed.is_closed:
            if change is not None:
                revision = change.revision
                yield _frame("run", f"{revision}.{event_id}", change.data)
                async for newest_id, frame in _event_frames(database, first.run_id, revision, event_id):
                    event_id = newest_id
                    yield frame
            newest = feed.newest
            change = await feed.latest(first.run_id, seen)
            # What lies before need not be looked at again, however much happens to other runs.
            seen = max(seen, newest if change is None else change.revision)
            if change is None and not await feed.wait(seen, _KEEPALIVE_S):
                with suppress(Unavailable):
                    await run_in_threadpool(feed.read_run, first.run_id)
                yield b": still here\n\n"
    except NotFound:
        # Deleted: this was all.
        return
    finally:
        feed.leave()


async def _event_frames(database: Database, run_id: str, revision: int, after: int) -> AsyncIterator[tuple[int, bytes]]:
    while events := await run_in_threadpool(_events_after, database, run_id, after, 200):
        for event in events:
            after = event.id
            yield after, _frame("event", f"{revision}.{after}", dumps(event.model_dump(mode="json")))


def _events_after(database: Database, run_id: str, after: int, limit: int) -> list[EventOut]:
    with database.read() as session:
        run = RunRepository(session).get(run_id)
        return [present_event(event) for event in EventRepository(session).after(after, run=run, limit=limit)]


def _frame(event: str, place: str, data: bytes) -> bytes:
    # JSON on one line: a newline in it is escaped, so it cannot end the frame.
    return b"event: %b\nid: %b\ndata: %b\n\n" % (event.encode(), place.encode(), data)
