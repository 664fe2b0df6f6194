"""A client that holds the service to its OpenAPI document: no answer has a status that its operation does not state."""

import re
from collections.abc import Mapping
from functools import lru_cache

import httpx

from service.app import create_app
from service.settings import Settings


@lru_cache(maxsize=1)
def _documented() -> Mapping[tuple[str, re.Pattern[str]], frozenset[str]]:
    """The statuses of each method and path. A path without a parameter comes before one that would take it too."""
    paths = create_app(Settings()).openapi()["paths"]
    return {
        (method.upper(), re.compile(re.sub(r"\{[^}]*\}", "[^/]+", path))): frozenset(operation["responses"])
        for path in sorted(paths, key=lambda path: path.count("{"))
        for method, operation in paths[path].items()
    }


def hold_to_document(response: httpx.Response) -> None:
    """An httpx event hook. What is outside the document, the dashboard's files for one, passes; so does a 500.

    Raises:
        AssertionError: the answer's status is none of its operation's.
    """
    method, path = response.request.method, response.request.url.path
    for (documented_method, pattern), statuses in _documented().items():
        if method == documented_method and pattern.fullmatch(path):
            assert str(response.status_code) in statuses or response.status_code == 500, (
                f"{method} {path} answered {response.status_code}; its document states {sorted(statuses)}"
            )
            return
