"""What is new in a log that is read again and again: the service keeps a long one's beginning and its end alone."""

import re
from typing import Final

_LEFT_OUT: Final = re.compile(r"\n\[\.\.\. \d+ bytes left out \.\.\.\]\n")
# Of the kept end, enough to find where it begins in what was read before.
_ANCHOR: Final = 1024


def new_text(before: str, now: str) -> str:
    """Return what of `now` has come since the log was read as `before`; the whole of a new attempt's log.

    Where more has come than is kept, the line that says how much is left out comes first.
    """
    if now.startswith(before):
        return now[len(before) :]
    cuts = list(_LEFT_OUT.finditer(now))
    cut = cuts[-1] if cuts else None
    end = now[cut.end() :] if cut is not None else now
    place = before.find(end[:_ANCHOR])
    while place >= 0:
        num_known = len(before) - place
        if num_known <= len(end) and before.endswith(end[:num_known]):
            return end[num_known:]
        place = before.find(end[:_ANCHOR], place + 1)
    return now[cut.start() :] if cut is not None else now
