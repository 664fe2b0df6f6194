"""A service at the HTTP seam: answers as the real one does, and can be made to fail on the way."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

Handler = Callable[[httpx.Request], httpx.Response]


def run_json(run_id: str = "r1", **changes: Any) -> dict[str, Any]:
    """A run as the API gives it, queued unless changed."""
    run: dict[str, Any] = {
        "id": run_id,
        "name": "first",
        "spec": {"name": "first", "steps": 30, "task": {"name": "simple_model"}, "step_ordering": "ordered"},
        "fingerprint": "f" * 64,
        "status": "queued",
        "waiting_reason": None,
        "queue_position": None,
        "failure": None,
        "verdict": None,
        "findings": [],
        "attempts": [],
        "summary": {"steps": 0, "applied": 0, "discarded": 0, "overflows": 0, "final_loss_scale": None},
        "experiment_id": None,
        "tags": [],
        "created_at": "2026-01-02T03:04:05Z",
        "a_field_of_a_later_version": {"anything": 1},
    }
    return run | changes


TRAINED: dict[str, Any] = {
    "status": "succeeded",
    "verdict": {"name": "trains", "step": None, "parameter": None, "evidence": "30 steps, 28 applied, all finite"},
    "summary": {
        "steps": 30,
        "applied": 28,
        "discarded": 2,
        "overflows": 2,
        "final_loss_scale": 16384.0,
        "parameters_moved": 10,
        "parameters_total": 10,
        "momentum_finite": True,
        "max_weight_motion": 0.43,
        "last_loss": 1.5,
    },
}
DIED: dict[str, Any] = {
    "status": "failed",
    "failure": {"kind": "loss_scale_exhausted", "rank": 0, "step": 17, "message": "the loss scale is at its minimum"},
    "verdict": {"name": "dies", "step": 17, "parameter": None, "evidence": "overflow at loss scale 1"},
    "summary": {
        "steps": 17,
        "applied": 0,
        "discarded": 17,
        "overflows": 17,
        "final_loss_scale": 1.0,
        "parameters_moved": 0,
        "parameters_total": 10,
        "momentum_finite": False,
        "max_weight_motion": 0.0,
        "last_momentum_norm": "NaN",
    },
}


def problem(status: int, title: str, **members: Any) -> httpx.Response:
    document = {"type": "about:blank", "title": title, "status": status, "detail": title} | members
    return httpx.Response(
        status, content=json.dumps(document).encode(), headers={"Content-Type": "application/problem+json"}
    )


ALWAYS: dict[str, Any] = {"/healthz": {"status": "alive"}, "/readyz": {"status": "ready"}}


@dataclass
class FakeService:
    """Answers by path; `failures` are used up first, one a request."""

    answers: dict[tuple[str, str], Any] = field(default_factory=dict)
    """(method, path) to JSON, to a response, to a handler, or to a list of these used in turn, the last for ever."""
    failures: list[Exception | httpx.Response] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        answer = self.answers.get((request.method, request.url.path), ALWAYS.get(request.url.path))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if callable(answer):
            return answer(request)
        if isinstance(answer, httpx.Response):
            return answer
        if answer is None:
            return problem(404, "Nothing is found here", field="id", value=request.url.path, remedy="look elsewhere")
        return httpx.Response(200, json=answer)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    def paths(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]


class BrokenStream(httpx.SyncByteStream):
    """Server-sent events that end by a cut connection, as a killed server's do."""

    def __init__(self, text: str, *, cut: bool = True) -> None:
        self._text, self._cut = text, cut

    def __iter__(self) -> Iterator[bytes]:
        yield self._text.encode()
        if self._cut:
            raise httpx.ReadError("the connection was cut")
