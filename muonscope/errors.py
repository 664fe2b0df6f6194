"""Everything that `muonscope.client` and the `muonscope` command raise.

MuonscopeError
├── ServiceUnreachable        nothing answers at the address, or not in time
├── UnexpectedAnswer          something answers, and it is not this service
├── ServiceError              the service answered with a problem document
│   ├── InvalidRequest        400, 413, 415, 422: `field`, `value` and `remedy` say what to change
│   ├── Unauthorized          401, 403
│   ├── NotFound              404
│   ├── Conflict              409
│   └── ServiceFailed         5xx and 429: the service's side; worth trying again
├── SpecFileError             a spec file that cannot be read, or does not hold a RunSpec
├── RecordingFailed           a script's record cannot be begun
├── ServiceStartFailed        a service started for one command ended before it was ready
└── ReleaseNotTried           a bisect could not learn what a DeepSpeed release does
"""

from typing import Any


class MuonscopeError(Exception):
    """Base of all: `str(error)` says what happened, `remedy` what to try."""

    remedy: str | None = None

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class ServiceUnreachable(MuonscopeError):
    """Nothing answers at `url`, or not in time."""

    def __init__(self, url: str, reason: str, *, remedy: str | None = None) -> None:
        super().__init__(
            f"no service answers at {url} ({reason})",
            remedy=remedy or "start one with `muonscope up`, or set MUONSCOPE_URL to where it runs",
        )
        self.url = url
        self.reason = reason


class UnexpectedAnswer(MuonscopeError):
    """An answer that this service does not give: another program on the port, or another version."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"the answer of {url} is not one of this Muonscope version ({reason})",
            remedy="check MUONSCOPE_URL, and that client and service are of the same version",
        )
        self.url = url
        self.reason = reason


class ServiceError(MuonscopeError):
    """The service refused or failed, and said so in a problem document (RFC 9457)."""

    def __init__(self, status: int, title: str, detail: str, *, problem: dict[str, Any] | None = None) -> None:
        document = problem or {}
        super().__init__(detail or title, remedy=document.get("remedy"))
        self.status = status
        self.title = title
        self.detail = detail
        self.type: str = document.get("type") or "about:blank"
        self.field: str | None = document.get("field")
        self.value: Any = document.get("value")
        self.problem = document


class InvalidRequest(ServiceError):
    """The request cannot be accepted as it is."""


class Unauthorized(ServiceError):
    """A token is missing, or does not allow this."""


class NotFound(ServiceError):
    """There is no such run, experiment or page."""


class Conflict(ServiceError):
    """The thing's present state does not allow this."""


class ServiceFailed(ServiceError):
    """The service could not serve a valid request; the same request may succeed later."""


class SpecFileError(MuonscopeError):
    """A spec file that cannot be read, or that does not hold a RunSpec."""

    def __init__(self, path: str, message: str, *, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(f"{path}: {message}", remedy=remedy)
        self.path = path
        self.field = field


class RecordingFailed(MuonscopeError):
    """A script's record cannot be begun: a file that cannot be written, or another rank's trouble."""


class ServiceStartFailed(MuonscopeError):
    """A service started for one command ended, or did not become ready in time."""


class ReleaseNotTried(MuonscopeError):
    """A machine failed, and not the DeepSpeed release that was to be tried on it."""

    def __init__(self, version: str, run_id: str, reason: str) -> None:
        super().__init__(
            f"run {run_id} under DeepSpeed {version} failed for a reason that says nothing of the release: {reason}",
            remedy=f"see `muonscope logs {run_id}`, mend it and bisect again",
        )
        self.version = version
        self.run_id = run_id


def error_for(status: int, title: str, detail: str, problem: dict[str, Any] | None = None) -> ServiceError:
    """Choose the exception for an HTTP status."""
    if status in (401, 403):
        kind: type[ServiceError] = Unauthorized
    elif status == 404:
        kind = NotFound
    elif status == 409:
        kind = Conflict
    elif status == 429 or status >= 500:
        kind = ServiceFailed
    else:
        kind = InvalidRequest
    return kind(status, title, detail, problem=problem)
