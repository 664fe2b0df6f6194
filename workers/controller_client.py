"""The job's side of the attempt protocol (`muonscope/contract/attempts.py`), on the standard library alone.

Driver and shipper start fast and run beside a training loop, so they use `http.client` and no pydantic here:
messages go in and come out as bytes.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import quote, urlsplit

from workers.errors import AttemptSuperseded, ControllerAway, ControllerRefused

# Answers that mean "later": the request itself was fine.
_LATER: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONFLICT: Final = 409
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0

Result = TypeVar("Result")


class ControllerClient:
    """Posts messages about one attempt over one kept-alive connection. Not thread-safe: one a thread."""

    def __init__(self, url: str, attempt_id: str, token: str | None = None, timeout_s: float = 10.0) -> None:
        """Connect to nothing yet.

        Args:
            url: the controller's address, or several of which one leads, with commas between them: whenever one is
                away, the next request goes to the next.
            attempt_id: the attempt's.
            token: the attempt's, once it has one.
            timeout_s: of each step of a request.
        """
        self._urls = url.split(",")
        self._attempt_id, self._timeout_s = attempt_id, timeout_s
        self.token = token
        self._connect(self._urls[0])

    def _connect(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"controller URL {url!r} is not http(s)://host[:port]")
        connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = connection_type(parts.hostname, parts.port, timeout=self._timeout_s)
        self._base = f"{parts.path.rstrip('/')}/attempts/{quote(self._attempt_id, safe='')}"
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"

    def _try_next(self) -> None:
        self._connection.close()
        if len(self._urls) > 1:
            self._urls = [*self._urls[1:], self._urls[0]]
            self._connect(self._urls[0])

    def post(self, verb: str, body: bytes, content_type: str = "application/json") -> bytes:
        """POST `body` to `/attempts/{id}/{verb}` and return the answer's body.

        Raises:
            ControllerAway: no answer, one that says "later", or one that no controller gives.
            AttemptSuperseded: 409 that is not about enrolment.
            ControllerRefused: any other answer outside 2xx.
        """
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            self._connection.request("POST", f"{self._base}/{verb}", body, headers)
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            url = self.url
            self._try_next()
            raise ControllerAway(f"{url}/{verb}", f"{type(error).__name__}: {error}") from error
        is_taken = 200 <= response.status < 300
        # What stands in front of the controller may answer for it, with a page of its own.
        is_foreign = is_taken and bool(answer) and not answer.lstrip().startswith(b"{")
        if is_taken and not is_foreign:
            return answer
        url, detail = f"{self.url}/{verb}", _detail(answer)
        if response.status in _LATER or is_foreign:
            self._try_next()
            raise ControllerAway(url, f"{response.status}: {detail}", _retry_after_s(response.getheader("Retry-After")))
        if response.status == _CONFLICT and verb in ("heartbeat", "facts", "checkpoints", "outcome"):
            raise AttemptSuperseded(url, response.status, detail)
        raise ControllerRefused(url, response.status, detail)

    def close(self) -> None:
        self._connection.close()


def until_answered(
    call: Callable[[], Result],
    *,
    patience_s: float,
    give_up: threading.Event | None = None,
    on_away: Callable[[ControllerAway], None] = lambda _: None,
) -> Result:
    """Repeat `call` while the controller is away, with growing pauses.

    Args:
        call: raises ControllerAway to be tried again.
        patience_s: how long to keep trying; the last ControllerAway is raised after it.
        give_up: ends the waiting early once set.
        on_away: told of each failed try.
    """
    deadline = time.monotonic() + patience_s
    pauses = Pauses()
    while True:
        try:
            return call()
        except ControllerAway as away:
            on_away(away)
            pause = pauses.next(away.retry_after_s)
            if time.monotonic() + pause > deadline:
                raise
            if give_up is None:
                time.sleep(pause)
            elif give_up.wait(pause):
                raise


class Pauses:
    """Growing pauses between tries, spread out so that many jobs do not return at once."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def next(self, asked_s: float | None = None) -> float:
        """Return how long to wait now; `asked_s` is what the other side asked for."""
        pause = self._pause_s * random.uniform(0.8, 1.2)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause if asked_s is None else max(pause, min(asked_s, 60.0))

    def reset(self) -> None:
        self._pause_s = FIRST_PAUSE_S


def _detail(answer: bytes) -> str:
    text = answer[:2000].decode("utf-8", "replace")
    try:
        problem = json.loads(answer)
    except ValueError:
        return text
    return str(problem.get("detail") or problem.get("title") or text) if isinstance(problem, dict) else text


def _retry_after_s(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
