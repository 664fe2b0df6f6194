"""Server-sent events: their decoding, and when and where to take a broken stream up again."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from muonscope.client.models import Event

FIRST_RECONNECT_S: Final = 0.2
LONGEST_RECONNECT_S: Final = 5.0
DEFAULT_PATIENCE_S: Final = 60.0
POLL_S: Final = 0.5


_LINE_END: Final = re.compile(r"\r\n|\n|\r(?=[^\n])")


class LineSplitter:
    """Cut a stream's text into lines where server-sent events have them, and nowhere else.

    `str.splitlines`, and httpx with it, also cuts at U+2028 and its like, which a run's name may hold.
    """

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Take the next piece of text; returns the lines that it completes."""
        *lines, self._rest = _LINE_END.split(self._rest + text)
        return lines


class EventDecoder:
    """Turn a stream's lines into events, as the HTML standard's section on server-sent events says."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.reconnect_s: float | None = None
        self._event = ""
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        """Take one line without its end; returns the event that it completes, if any."""
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            return None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
        elif name == "retry" and value.isdecimal():
            self.reconnect_s = int(value) / 1000
        return None

    def _dispatch(self) -> Event | None:
        name, data = self._event or "message", "\n".join(self._data)
        has_data = bool(self._data)
        self._event, self._data = "", []
        return Event(id=self.last_id, event=name, data=_decoded(data)) if has_data else None


def _decoded(data: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


@dataclass(slots=True)
class Patience:
    """Where a stream or a watch stood when it broke, and how much longer to try."""

    limit_s: float
    """Give up after the service has been away for this long."""
    last_id: str | None = None
    broken_since: float | None = None
    _pause_s: float = field(default=FIRST_RECONNECT_S)

    def headers(self) -> dict[str, str]:
        return {} if self.last_id is None else {"Last-Event-ID": self.last_id}

    @property
    def last_history_id(self) -> int:
        """The newest entry of the run's history that the stream gave: ids are `revision.entry`."""
        entry = (self.last_id or "").partition(".")[2]
        return int(entry) if entry.isdecimal() else 0

    def note_event(self, event: Event) -> None:
        self.last_id = event.id if event.id is not None else self.last_id
        self.note_answer()

    def note_line(self, line: str) -> None:
        """Take a comment for a sign of life: a stream without an event may be quiet for hours."""
        if line.startswith(":"):
            self.note_answer()

    def note_answer(self) -> None:
        self.broken_since, self._pause_s = None, FIRST_RECONNECT_S

    def decide_pause(self, now: float) -> float | None:
        """Say how long to wait before trying again, or None to give up; `now` is a monotonic clock's."""
        self.broken_since = now if self.broken_since is None else self.broken_since
        if now - self.broken_since >= self.limit_s:
            return None
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 2, LONGEST_RECONNECT_S)
        return pause_s
