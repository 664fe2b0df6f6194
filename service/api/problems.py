"""Every failure as one `application/problem+json` document: type, title, status, detail, field, value, remedy."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Tag
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from muonscope.contract.run_spec import BUILT_IN_TASKS, RunSpec
from service.errors import (
    Forbidden,
    InvalidInput,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ServiceError,
    Unauthorized,
    UnsupportedMediaType,
    bounded_value,
)

MEDIA_TYPE: Final = "application/problem+json"
_MAX_ERRORS: Final = 20
_MAX_TEXT: Final = 2000
_PLACES: Final = {"body", "query", "path", "header", "cookie"}
# Messages of our own validators begin with what they are about: `faults[0].rank=3 does not exist …`.
_ABOUT: Final = re.compile(r"([a-z_]\w*(?:[.\[\]]\w*)*)=(\S+)")
# `ds_config.train_batchsize is no key …`, `ds_config.zero_optimization='auto' means …`: any key may stand there.
_ABOUT_DS_CONFIG: Final = re.compile(r"ds_config\.([^\s=]+)")


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)


def render(error: ServiceError, errors: Sequence[Mapping[str, Any]] = ()) -> Response:
    """Turn an error into its response; `errors` lists all that was wrong where it was more than one thing."""
    document: dict[str, Any] = {key: _bounded(value) for key, value in error.problem().items()}
    if len(errors) > 1:
        document["errors"] = list(errors[:_MAX_ERRORS])
    body = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Response(body, error.status, headers=error.headers, media_type=MEDIA_TYPE)


def _bounded(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


async def _on_service_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return render(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # FastAPI wraps what reading the body raised; the cause knows better.
    if isinstance(error.__cause__, ServiceError):
        return render(error.__cause__)
    translated = _translate_http(request, error)
    translated.headers = {**(error.headers or {}), **translated.headers}
    return render(translated)


def _translate_http(request: Request, error: HTTPException) -> ServiceError:
    path = request.url.path
    match error.status_code:
        case 404:
            return NotFound(
                f"there is nothing at {path[:200]}", field="path", value=path,
                remedy="see /openapi.json for what there is",
            )  # fmt: skip
        case 405:
            allowed = ", ".join(_methods_at(request))
            refused = MethodNotAllowed(
                f"{request.method} is not offered at {path[:200]}", field="method", value=request.method,
                remedy=f"use {allowed}",
            )  # fmt: skip
            refused.headers = {"Allow": allowed}
            return refused
        case 401:
            return Unauthorized(str(error.detail))
        case 403:
            return Forbidden(str(error.detail))
        case 413:
            return PayloadTooLarge(str(error.detail))
        case 415:
            return UnsupportedMediaType(str(error.detail))
        case 400:
            return MalformedRequest(str(error.detail), remedy="send a body that matches /openapi.json")
        case status if status < 500:
            return InvalidInput(str(error.detail))
    return ServiceError(str(error.detail))


def _methods_at(request: Request) -> list[str]:
    """Return what is offered at a path: of all its routes, where Starlette's own answer knows the first alone."""
    here = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    # `/runs/validate` is no run of that name.
    fewest = min((len(route.param_convertors) for route in here), default=0)
    offered = {method for route in here if len(route.param_convertors) == fewest for method in route.methods or ()}
    # Files of the dashboard are no routes.
    return sorted(offered) or ["GET", "HEAD"]


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    body_field = getattr(request.scope.get("route"), "body_field", None)
    model = body_field.field_info.annotation if body_field is not None else None
    found = [_describe(one, error.body, model) for one in error.errors()[:_MAX_ERRORS]]
    first = found[0]
    kind = MalformedRequest if error.errors()[0]["type"] == "json_invalid" else InvalidInput
    raised = kind(str(first["detail"]), field=first["field"], remedy=first["remedy"])
    raised.value = first["value"]
    return render(raised, found)


def validation_problem(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidInput:
    """Turn pydantic's errors about a run spec that was no request body into one of ours."""
    first = _describe(errors[0], body, RunSpec)
    raised = InvalidInput(str(first["detail"]), field=first["field"], remedy=first["remedy"])
    raised.value = first["value"]
    return raised


def _describe(error: Mapping[str, Any], body: Any, model: Any) -> dict[str, Any]:
    message = (
        "unknown field"
        if error["type"] == "extra_forbidden"
        else str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    )
    path = _path(error, body)
    value = None if error["type"] == "missing" else error.get("input")
    if error["type"] in ("value_error", "assertion_error"):
        about, about_ds_config = _ABOUT.match(message), _ABOUT_DS_CONFIG.match(message)
        if about_ds_config is not None and isinstance(value, dict):
            path, value = _in_ds_config(about_ds_config[1], path, value)
        elif about is not None and isinstance(value, dict):
            # A rule about several fields: say the one that it names.
            path, value = _join(path, about[1]), _as_given(about[2].rstrip(",;"))
    if error["type"] == "unknown_task" and isinstance(value, str) and (value in BUILT_IN_TASKS or ":" in value):
        # A right name where the object that holds it is to stand.
        message = f"task is an object that holds the name; write task: {json.dumps({'name': value[:100]})}"
    elif error["type"] == "unknown_task":
        path, value = _join(path, "name"), value.get("name") if isinstance(value, dict) else value
        message = f"{message}; {_meant_task(value)}"
    if not path and tuple(error.get("loc", ()))[:1] == ("body",):
        path = "body"
    detail, remedy = _split(message)
    return {
        "detail": detail if detail.startswith((path, path.rpartition(".")[2])) else f"{path}: {detail}",
        "field": path or None,
        "value": bounded_value(value),
        "remedy": remedy or _remedy(error, path, model),
    }


def _as_given(text: str) -> Any:
    """Read the value that a sentence has: a number as the number that was sent."""
    try:
        return int(text)
    except ValueError:
        return text


def _in_ds_config(key: str, path: str, value: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the path and the value of a key inside `ds_config`, from the spec or the ds_config that was refused."""
    inside = path.rpartition(".")[2] == "ds_config"
    here: Any = value if inside else value.get("ds_config")
    for part in key.split("."):
        here = _step_into(here, part)
    return _join(path if inside else _join(path, "ds_config"), key), here


def _path(error: Mapping[str, Any], body: Any) -> str:
    """Return the dotted path of the field, without the place it came in and without a union's tags."""
    location = list(error.get("loc", ()))
    if error["type"] == "json_invalid":
        return "body"
    in_body = bool(location) and location[0] == "body"
    if location and location[0] in _PLACES:
        location = location[1:]
    path, here = "", body if in_body else None
    for place, part in enumerate(location):
        is_last = place == len(location) - 1
        if in_body and isinstance(here, dict) and part not in here and not is_last:
            continue
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, str(part))
        here = _step_into(here, part)
    return path


def _step_into(here: Any, part: Any) -> Any:
    try:
        return here[part]
    except (KeyError, IndexError, TypeError):
        return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _split(message: str) -> tuple[str, str | None]:
    detail, separator, remedy = message.rpartition("; ")
    return (detail, remedy) if separator else (message, None)


_TYPE_NAMES: Final = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "model_attributes": "an object",
    "enum": "one of the listed words",
}


def _remedy(error: Mapping[str, Any], path: str, model: Any) -> str:
    kind, context = str(error["type"]), error.get("ctx") or {}
    limits = {
        "greater_than_equal": f"use {context.get('ge')} or more",
        "greater_than": f"use more than {context.get('gt')}",
        "less_than_equal": f"use {context.get('le')} or less",
        "less_than": f"use less than {context.get('lt')}",
        "string_too_long": f"use at most {context.get('max_length')} characters",
        "too_long": f"use at most {context.get('max_length')} items",
        "string_pattern_mismatch": f"match {context.get('pattern')}",
        "enum": f"use one of {context.get('expected')}",
        "literal_error": f"use one of {context.get('expected')}",
        "finite_number": "give a finite number",
        "missing": "add it",
        "json_invalid": "send valid JSON",
    }
    if kind in limits:
        return limits[kind]
    if kind == "value_error":
        return "change it, or what it must go with"
    if kind == "extra_forbidden":
        *place, name = error["loc"]
        return _did_you_mean(str(name), _known_fields(model, place))
    base = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
    return f"give {_TYPE_NAMES[base]}" if base in _TYPE_NAMES else "see /openapi.json for what is accepted"


def _known_fields(model: Any, location: Sequence[Any]) -> list[str]:
    """Return the fields of the model at an error's location, a union's tag included; none where no model is there."""
    here = _models_in(model)
    for part in location[1:] if location[:1] == ["body"] else location:
        if isinstance(part, int):
            continue
        tagged = [(tag, each) for tag, each in here if tag == part]
        fields = [each.model_fields[part].annotation for _, each in here if part in each.model_fields]
        here = tagged or [found for annotation in fields for found in _models_in(annotation)]
    return sorted({name for _, each in here for name in each.model_fields})


def _models_in(annotation: Any, tag: str | None = None) -> list[tuple[str | None, type[BaseModel]]]:
    """List the models that a type is made of, each with its tag where it has one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(tag, annotation)]
    tag = next((mark.tag for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Tag)), tag)
    return [found for part in get_args(annotation) for found in _models_in(part, tag)]


def _meant_task(name: Any) -> str:
    close = difflib.get_close_matches(str(name), BUILT_IN_TASKS, n=1)
    known = f"use one of {', '.join(BUILT_IN_TASKS)}, or an allow-listed module:function"
    return f"did you mean {close[0]}? else {known}" if close else known


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? else remove it" if close else "remove it; see /openapi.json for the known fields"
