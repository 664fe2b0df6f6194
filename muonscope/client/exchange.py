"""How a call is carried out, without the input and output: build, send, judge, wait, send again, read.

`exchange` is a generator: it yields what to do next, a `Send` or a `Pause`, and is sent the response or the
transport's error. The synchronous and the asynchronous client drive the same one, so there is one set of rules.
"""

import json
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx
from pydantic import ValidationError

from muonscope.client.calls import Call
from muonscope.errors import ServiceError, ServiceUnreachable, UnexpectedAnswer, error_for

Answer = TypeVar("Answer")

DEFAULT_RETRIES: Final = 3
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 30.0
# A stream is silent while nothing changes; the service sends a comment line well within this.
STREAM_SILENCE_S: Final = 60.0

TIMEOUT: Final = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
STREAM_TIMEOUT: Final = httpx.Timeout(STREAM_SILENCE_S, connect=CONNECT_TIMEOUT_S)

_RETRIED_STATUSES: Final = frozenset({429, 502, 503, 504})
_EXCERPT_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Send:
    """Send `request`; answer with the read response or the transport's error."""

    request: httpx.Request


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next try."""

    seconds: float


Outcome = httpx.Response | httpx.TransportError
Exchange = Generator[Send | Pause, Outcome | None, Answer]


def exchange(call: Call[Answer], client: httpx.Client | httpx.AsyncClient, retries: int) -> Exchange[Answer]:
    """Carry out one call.

    Raises:
        ServiceUnreachable, UnexpectedAnswer, ServiceError: as `muonscope.errors` says.
    """
    request = build_request(call, client)
    attempt = 0
    while True:
        outcome = yield Send(request)
        assert outcome is not None
        pause_s = decide_pause(call, outcome, attempt, retries)
        if pause_s is None:
            break
        yield Pause(pause_s)
        attempt += 1
    if isinstance(outcome, httpx.TransportError):
        raise unreachable(request, outcome) from outcome
    return read_answer(call, outcome)


def build_request(call: Call[Any], client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
    headers = dict(call.headers)
    content = None
    if isinstance(call.body, bytes):
        content = call.body
        headers["Content-Type"] = "application/octet-stream"
    elif call.body is not None:
        # Not httpx's own encoder: it refuses NaN with a bare ValueError, where the service names the field.
        content = json.dumps(call.body).encode()
        headers["Content-Type"] = "application/json"
    timeout = STREAM_TIMEOUT if headers.get("Accept") == "text/event-stream" else httpx.USE_CLIENT_DEFAULT
    return client.build_request(
        call.method, call.path, params=dict(call.params), content=content, headers=headers, timeout=timeout
    )


def decide_pause(call: Call[Any], outcome: Outcome, attempt: int, retries: int) -> float | None:
    """Say how long to wait before sending again, or None to take the outcome as it is.

    A refused connection reached nobody, so any call may be repeated after it; everything else only where twice is once.
    """
    if attempt >= retries or isinstance(outcome, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return None
    pause_s: float = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
    if isinstance(outcome, httpx.ConnectError):
        return pause_s
    if not call.is_repeatable:
        return None
    if isinstance(outcome, httpx.TransportError):
        return pause_s
    if outcome.status_code not in _RETRIED_STATUSES:
        return None
    asked_s = _retry_after_s(outcome)
    return pause_s if asked_s is None else min(asked_s, LONGEST_PAUSE_S)


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # absent, or a date: our service sends seconds
        return None


def read_answer(call: Call[Answer], response: httpx.Response) -> Answer:
    """Turn a response into the call's answer, or raise what it says."""
    if not response.is_success:
        raise read_problem(response)
    try:
        answer = response.text if call.is_text else response.json()
        return call.parse((answer, response.status_code == httpx.codes.CREATED) if call.tells_new else answer)
    except (ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnexpectedAnswer(str(response.url), _first_line(error)) from error


def read_problem(response: httpx.Response) -> ServiceError | UnexpectedAnswer:
    """Turn a refusal into the exception for it."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "title" in problem:
        detail = str(problem.get("detail") or "")
        return error_for(response.status_code, str(problem["title"]), detail, problem)
    excerpt = response.text[:_EXCERPT_CHARACTERS].strip()
    if response.status_code >= 500:
        return error_for(response.status_code, response.reason_phrase, excerpt)
    return UnexpectedAnswer(str(response.url), f"{response.status_code} without a problem document: {excerpt!r}")


def unreachable(request: httpx.Request, error: httpx.TransportError) -> ServiceUnreachable:
    if isinstance(error, httpx.TimeoutException):
        reason = f"no answer in time: {type(error).__name__}"
    else:
        reason = str(error) or type(error).__name__
    port = f":{request.url.port}" if request.url.port else ""
    return ServiceUnreachable(f"{request.url.scheme}://{request.url.host}{port}", reason)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
