"""JSON answers that are JSON: a non-finite number is its string, never the token NaN."""

import json
import math
from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import JSONResponse

from muonscope.contract.telemetry import encode_number


def dumps(content: Any) -> bytes:
    """Encode what FastAPI has made plain; one pass where all numbers are finite, which is nearly always."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return encode_number(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class StrictJSONResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumps(content)


# Each router says so itself: the application then takes its routes as they are, and works none out a second time.
Router: Final = partial(APIRouter, default_response_class=StrictJSONResponse)
