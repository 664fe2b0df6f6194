"""What can go wrong in the service, each with its HTTP status and what to do about it.

    ServiceError                500
      InvalidInput              422   a value that cannot be accepted: says field, value and remedy
        MalformedRequest        400   the request cannot be read at all
        UntrustedHost           421   the Host header names another server
      Unauthorized              401
      Forbidden                 403
      NotFound                  404
      MethodNotAllowed          405
      RequestTooSlow            408
      Conflict                  409   what is asked contradicts what is stored
        IllegalTransition       409   a status change that the table of legal transitions does not hold
      PayloadTooLarge           413
      UnsupportedMediaType      415
      RateLimited               429
      Unavailable               503   a part the answer needs is away; trying again may help

One handler (`service/api/problems.py`) renders them all as `application/problem+json`.
"""

import math
from typing import Any, ClassVar, Final

MAX_VALUE_LENGTH: Final = 200


def bounded_value(value: Any) -> str | int | float | bool | None:
    """Return a JSON-safe likeness of a rejected value: small scalars as they are, all else as bounded text.

    Whatever it is given (lone surrogates, NaN, a megabyte of text, an integer of a thousand digits, deep nesting),
    the result can be encoded and is at most `MAX_VALUE_LENGTH` characters long.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _bounded_text(value)


def _bounded_text(value: Any) -> str:
    if isinstance(value, str):
        text = value[: MAX_VALUE_LENGTH + 1]
    elif isinstance(value, int):
        text = f"an integer of {value.bit_length()} bits"
    elif isinstance(value, dict | list | tuple | set | bytes):
        text = _short_collection(value)
    else:
        text = str(value)[: MAX_VALUE_LENGTH + 1]
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1] + "…"


def _short_collection(value: Any) -> str:
    try:
        # Only small collections are spelled out: a repr of a large one would cost what the limits are there to save.
        if len(value) <= 20:
            return repr(value)[: MAX_VALUE_LENGTH + 1]
    except RecursionError:
        pass
    return f"{type(value).__name__} of {len(value)} items"


class ServiceError(Exception):
    """A failure with an HTTP status; the message says what happened, `remedy` what to try."""

    status: ClassVar[int] = 500
    type_: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "The service failed"

    def __init__(self, detail: str, *, field: str | None = None, value: Any = None, remedy: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.value = bounded_value(value)
        self.remedy = remedy
        self.headers: dict[str, str] = {}

    def problem(self) -> dict[str, str | int | float | bool | None]:
        """Return the members of the problem document (RFC 9457)."""
        return {
            "type": f"/problems/{self.type_}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "field": self.field,
            "value": self.value,
            "remedy": self.remedy,
        }


class InvalidInput(ServiceError):
    status = 422
    type_ = "invalid-input"
    title = "The input is not valid"


class MalformedRequest(InvalidInput):
    status = 400
    type_ = "malformed-request"
    title = "The request cannot be read"


class UntrustedHost(InvalidInput):
    status = 421
    type_ = "untrusted-host"
    title = "The Host header names another server"


class Unauthorized(ServiceError):
    status = 401
    type_ = "unauthorized"
    title = "A valid token is needed"

    def __init__(self, detail: str, *, remedy: str | None = None) -> None:
        super().__init__(detail, remedy=remedy)
        self.headers = {"WWW-Authenticate": "Bearer"}


class Forbidden(ServiceError):
    status = 403
    type_ = "forbidden"
    title = "Not allowed"


class NotFound(ServiceError):
    status = 404
    type_ = "not-found"
    title = "Nothing is found here"


class MethodNotAllowed(ServiceError):
    status = 405
    type_ = "method-not-allowed"
    title = "The method is not offered here"


class RequestTooSlow(ServiceError):
    status = 408
    type_ = "request-too-slow"
    title = "The request took too long to arrive"


class Conflict(ServiceError):
    status = 409
    type_ = "conflict"
    title = "The request contradicts what is stored"


class IllegalTransition(Conflict):
    type_ = "illegal-transition"
    title = "The status does not allow this"


class PayloadTooLarge(ServiceError):
    status = 413
    type_ = "payload-too-large"
    title = "The request is too large"


class UnsupportedMediaType(ServiceError):
    status = 415
    type_ = "unsupported-media-type"
    title = "The content type is not accepted here"


class RateLimited(ServiceError):
    status = 429
    type_ = "rate-limited"
    title = "Too many requests"


class Unavailable(ServiceError):
    status = 503
    type_ = "unavailable"
    title = "A needed part is not available"

    def __init__(
        self,
        detail: str,
        *,
        field: str | None = None,
        value: Any = None,
        remedy: str | None = None,
        retry_after_s: int = 2,
    ) -> None:
        super().__init__(detail, field=field, value=value, remedy=remedy)
        self.headers = {"Retry-After": str(retry_after_s)}
