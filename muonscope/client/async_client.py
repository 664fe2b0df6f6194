"""The asynchronous client: the same calls and rules, awaited."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

import httpx

from muonscope.client import calls
from muonscope.client.calls import Call, Spec
from muonscope.client.exchange import (
    DEFAULT_RETRIES,
    TIMEOUT,
    Pause,
    build_request,
    exchange,
    read_problem,
    unreachable,
)
from muonscope.client.models import (
    Alert,
    Comparison,
    Delivery,
    Event,
    Experiment,
    HistoryEvent,
    Page,
    Parameter,
    ParameterStep,
    Run,
    Series,
    Step,
)
from muonscope.client.settings import ClientSettings, checked_url, request_headers, trust_for
from muonscope.client.streams import DEFAULT_PATIENCE_S, POLL_S, EventDecoder, LineSplitter, Patience
from muonscope.errors import ServiceFailed, ServiceUnreachable, UnexpectedAnswer

Answer = TypeVar("Answer")


class _Finishes(Protocol):
    @property
    def is_finished(self) -> bool: ...


Watched = TypeVar("Watched", bound=_Finishes)


class AsyncClient:
    """Talk to a Muonscope service.

        async with AsyncClient() as muonscope:
            run = await muonscope.runs.submit(RunSpec(name="first", steps=10))
            async for state in muonscope.runs.watch(run.id):
                print(state.status, state.summary.steps)

    Args:
        url: address of the service; by default `MUONSCOPE_URL`, else http://127.0.0.1:8800.
        token: bearer token; by default `MUONSCOPE_TOKEN`. An empty one sends none.
        retries: how often a call that may be repeated is sent again after it failed on the way.
        transport: an httpx transport, for tests and unusual routes.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        retries: int = DEFAULT_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        settings = ClientSettings()
        self.url = checked_url(url or settings.url)
        self._retries = retries
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=request_headers(settings, token),
            verify=trust_for(self.url),
            timeout=TIMEOUT,
            transport=transport,
        )
        self.runs = AsyncRuns(self)
        self.experiments = AsyncExperiments(self)
        self.alerts = AsyncAlerts(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def compare(self, run_a: str, run_b: str) -> Comparison:
        """Compare two runs: what differs in their specs, and where their records part."""
        return await self.send(calls.compare_runs(run_a, run_b))

    async def cluster(self) -> dict[str, Any]:
        """Describe the nodes and resources that runs are placed on."""
        return await self.send(calls.get_cluster())

    async def queue(self) -> dict[str, Any]:
        """Describe whether runs start, how many wait, and the limits."""
        return await self.send(calls.get_queue())

    async def set_queue_mode(self, verb: Literal["pause", "resume", "drain"], *, why: str = "") -> dict[str, Any]:
        """Pause, resume or drain the queue; returns what `queue` does."""
        return await self.send(calls.set_queue_mode(verb, why))

    async def set_queue_limit(self, kind: Literal["user", "tag"], name: str, max_gpus: float | None) -> dict[str, Any]:
        """Let a user's or a tag's runs hold at most so many GPUs at once; None takes the limit away."""
        return await self.send(calls.set_queue_limit(kind, name, max_gpus))

    async def readiness(self) -> dict[str, Any]:
        """Answer when the service can take runs; raises ServiceFailed with the reason when it cannot."""
        return await self.send(calls.get_readiness())

    async def health(self) -> dict[str, Any]:
        """Answer when the service is alive."""
        return await self.send(calls.get_health())

    def events(self, *, after: str | None = None, patience_s: float = DEFAULT_PATIENCE_S) -> AsyncIterator[Event]:
        """Follow every run's changes; takes a broken stream up where it stood. Ends only by an error."""
        return self.stream(None, after, patience_s)

    async def send(self, call: Call[Answer]) -> Answer:
        """Carry out one call: what every method here comes down to."""
        steps = exchange(call, self._http, self._retries)
        outcome: httpx.Response | httpx.TransportError | None = None
        try:
            while True:
                action = steps.send(outcome)
                outcome = None
                if isinstance(action, Pause):
                    await asyncio.sleep(action.seconds)
                    continue
                try:
                    outcome = await self._http.send(action.request)
                except httpx.TransportError as error:
                    outcome = error
                except httpx.DecodingError as error:
                    raise UnexpectedAnswer(self.url, str(error)) from error
        except StopIteration as finished:
            answer: Answer = finished.value
            return answer

    async def stream(self, run_id: str | None, after: str | None, patience_s: float) -> AsyncIterator[Event]:
        """Yield a stream's events, connecting again after `after` or the last one seen whenever it breaks.

        The service keeps a run's stream open, for it may be retried; here it ends with the run.
        """
        patience = Patience(patience_s, last_id=after)
        while True:
            failure, is_over = None, False
            try:
                # Closed at once when the run is over, not when the collector gets to it.
                async with aclosing(self._read_events(run_id, patience)) as events:
                    async for event in events:
                        patience.note_event(event)
                        yield event
                        is_over = run_id is not None and event.ends_a_run
                        if is_over:
                            break
            except (ServiceUnreachable, ServiceFailed) as error:
                failure = error
            if run_id is not None and (is_over or (failure is None and (await self.runs.get(run_id)).is_finished)):
                async for last in self._rest_of_history(run_id, patience):
                    yield last
                return
            await self._wait(patience, failure)

    async def _rest_of_history(self, run_id: str, patience: Patience) -> AsyncIterator[Event]:
        for entry in await self.send(calls.list_events(run_id, patience.last_history_id)):
            yield Event(event="event", data=entry.model_dump(mode="json"))

    async def download(self, call: Call[str]) -> AsyncIterator[str]:
        """Yield an answer's text piece by piece, whatever its length."""
        async with self._opened(build_request(call, self._http)) as response:
            async for text in response.aiter_text():
                yield text

    async def poll(self, call: Call[Watched], every_s: float, patience_s: float) -> AsyncIterator[Watched]:
        """Yield each changed answer of a call until it says that it is finished."""
        patience, seen = Patience(patience_s), None
        while True:
            try:
                answer = await self.send(call)
            except (ServiceUnreachable, ServiceFailed) as error:
                await self._wait(patience, error)
                continue
            patience.note_answer()
            # Its text: a loss that is NaN differs from itself.
            said = repr(answer)
            if said != seen:
                yield answer
            if answer.is_finished:
                return
            seen = said
            await asyncio.sleep(every_s)

    async def _read_events(self, run_id: str | None, patience: Patience) -> AsyncGenerator[Event]:
        request = build_request(calls.stream_events(run_id), self._http)
        request.headers.update(patience.headers())
        splitter, decoder = LineSplitter(), EventDecoder()
        async with self._opened(request) as response:
            async for text in response.aiter_text():
                for line in splitter.feed(text):
                    patience.note_line(line)
                    event = decoder.feed(line)
                    if event is not None:
                        yield event

    @asynccontextmanager
    async def _opened(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        """Open a response to read it piece by piece; what it says or how it breaks becomes our errors."""
        try:
            response = await self._http.send(request, stream=True)
            try:
                if not response.is_success:
                    await response.aread()
                    raise read_problem(response)
                yield response
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise unreachable(request, error) from error
        except httpx.DecodingError as error:
            raise UnexpectedAnswer(self.url, str(error)) from error

    async def _wait(self, patience: Patience, failure: Exception | None) -> None:
        pause_s = patience.decide_pause(time.monotonic())
        if pause_s is None:
            raise failure or ServiceUnreachable(self.url, f"its stream kept ending for {patience.limit_s:g} s")
        await asyncio.sleep(pause_s)


class AsyncRuns:
    """`client.runs`: everything about single runs."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> Run:
        """Queue a run. Sent again after a failure on the way, with the same key, it stays one run."""
        return await self._client.send(calls.submit_run(spec, idempotency_key))

    async def validate(self, spec: Spec) -> dict[str, Any]:
        """Return the spec as it would be stored, with its fingerprint. Raises what `submit` would; queues nothing."""
        return await self._client.send(calls.validate_run(spec))

    async def get(self, run_id: str) -> Run:
        return await self._client.send(calls.get_run(run_id))

    async def page(
        self,
        query: str | None = None,
        *,
        sort: str | None = None,
        cursor: str | int | None = None,
        limit: int | None = None,
    ) -> Page[Run]:
        """Return one page of runs, newest first unless `sort` says otherwise."""
        return await self._client.send(calls.list_runs(query, sort, cursor, limit))

    async def list(self, query: str | None = None, *, sort: str | None = None) -> AsyncIterator[Run]:
        """Iterate over all runs, page by page."""
        cursor: str | int | None = None
        while True:
            page = await self.page(query, sort=sort, cursor=cursor)
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    async def stop(self, run_id: str) -> Run:
        """Ask for a run's end; its GPUs are free a moment later."""
        return await self._client.send(calls.stop_run(run_id))

    async def retry(self, run_id: str) -> Run:
        """Queue a failed or stopped run again, for another attempt under the same id."""
        return await self._client.send(calls.retry_run(run_id))

    async def tag(self, run_id: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> Run:
        """Put tags on a run and take tags off it, whatever its status; twice is the same as once."""
        return await self._client.send(calls.tag_run(run_id, add, remove))

    async def clone(self, run_id: str, *, idempotency_key: str | None = None) -> Run:
        """Queue a new run with the same spec."""
        return await self._client.send(calls.clone_run(run_id, idempotency_key))

    async def steps(self, run_id: str, *, start: int = 0, stop: int | None = None) -> AsyncIterator[Step]:
        """Iterate over the recorded steps from `start` to before `stop`, exact, page by page."""
        position: int | None = start
        while position is not None:
            page = await self._client.send(calls.list_steps(run_id, position, stop))
            for item in page.items:
                yield item
            position = None if page.next_cursor is None else int(page.next_cursor)

    async def series(self, run_id: str, fields: Sequence[str], *, max_points: int = 1000) -> Series:
        """Return columns for a chart, thinned to `max_points`."""
        return await self._client.send(calls.get_series(run_id, fields, max_points))

    async def parameters(self, run_id: str) -> Sequence[Parameter]:
        return (await self._client.send(calls.list_parameters(run_id))).items

    async def parameter_steps(self, run_id: str, index: int) -> AsyncIterator[ParameterStep]:
        """Iterate over one parameter's momentum norm after each step."""
        position: int | None = 0
        while position is not None:
            page = await self._client.send(calls.list_parameter_steps(run_id, index, position))
            for item in page.items:
                yield item
            position = None if page.next_cursor is None else int(page.next_cursor)

    async def parameter_series(self, run_id: str, index: int, *, max_points: int = 1000) -> Series:
        """Return one parameter's momentum norms as columns for a chart, thinned to `max_points`."""
        return await self._client.send(calls.get_parameter_series(run_id, index, max_points))

    def csv(self, run_id: str, *, start: int = 0, stop: int | None = None) -> AsyncIterator[str]:
        """Iterate over the pieces of a CSV file of every step."""
        return self._client.download(calls.download_steps(run_id, start, stop))

    async def history(self, run_id: str) -> Sequence[HistoryEvent]:
        """Return every status change of a run."""
        return await self._client.send(calls.list_events(run_id))

    def events(
        self, run_id: str, *, after: str | None = None, patience_s: float = DEFAULT_PATIENCE_S
    ) -> AsyncIterator[Event]:
        """Follow one run's events to its end; takes a broken stream up where it stood."""
        return self._client.stream(run_id, after, patience_s)

    def watch(
        self, run_id: str, *, every_s: float = POLL_S, patience_s: float = DEFAULT_PATIENCE_S
    ) -> AsyncIterator[Run]:
        """Yield the run whenever it changed, until it is finished; outlives a restart of the service."""
        return self._client.poll(calls.get_run(run_id), every_s, patience_s)

    async def logs(self, run_id: str, *, rank: int | None = None) -> str:
        return await self._client.send(calls.get_logs(run_id, rank))


class AsyncExperiments:
    """`client.experiments`: questions, and the runs that answer them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, name: str, base: Spec, matrix: Mapping[str, Sequence[Any]]) -> Experiment:
        """Queue one run for every combination of the matrix's values."""
        return await self._client.send(calls.create_experiment(name, base, matrix))

    async def create_builtin(self, name: str, **options: Any) -> Experiment:
        """Queue the runs of an experiment that the service knows by name."""
        return await self._client.send(calls.create_builtin_experiment(name, options))

    async def list(self) -> AsyncIterator[Experiment]:
        """Iterate over all experiments, newest first, page by page."""
        cursor: str | int | None = None
        while True:
            page = await self._client.send(calls.list_experiments(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    async def get(self, experiment_id: str) -> Experiment:
        return await self._client.send(calls.get_experiment(experiment_id))

    def watch(
        self, experiment_id: str, *, every_s: float = POLL_S, patience_s: float = DEFAULT_PATIENCE_S
    ) -> AsyncIterator[Experiment]:
        """Yield the experiment whenever it changed, until all its runs are finished."""
        return self._client.poll(calls.get_experiment(experiment_id), every_s, patience_s)

    async def table(self, experiment_id: str, form: str = "md") -> str:
        """Return the result as text: `md` or `csv`."""
        return await self._client.send(calls.get_experiment_table(experiment_id, form))


class AsyncAlerts:
    """`client.alerts`: runs that are watched, and the messages posted about them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, name: str, url: str, when: Mapping[str, Any], *, tag: str | None = None) -> Alert:
        """Watch runs from now on. The answer alone holds the secret that verifies the messages."""
        return await self._client.send(calls.create_alert(name, url, when, tag))

    async def list(self) -> Sequence[Alert]:
        """Return all of them, oldest first."""
        return (await self._client.send(calls.list_alerts())).items

    async def delete(self, alert_id: str) -> None:
        """Watch no more; what is not delivered yet is not sent."""
        await self._client.send(calls.delete_alert(alert_id))

    async def test(self, alert_id: str) -> Delivery:
        """Queue a message that is about no run; `deliveries` tells how it went."""
        return await self._client.send(calls.send_test(alert_id))

    async def deliveries(self, alert_id: str, *, before: int | None = None, limit: int | None = None) -> Page[Delivery]:
        """Return one page of what was sent, newest first; `before` is the page before's `next_cursor`."""
        return await self._client.send(calls.list_deliveries(alert_id, before, limit))
