"""Every request of the API as a value: what to send, whether it may be sent twice, how to read the answer.

Both clients carry these out; neither knows a path, a key or a parameter of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel

from muonscope.client.models import (
    Alert,
    Comparison,
    Delivery,
    Event,
    Experiment,
    HistoryEvent,
    Page,
    Parameter,
    ParameterStep,
    Run,
    Series,
    Step,
)
from muonscope.contract.recordings import RecordingStarted, RunRecord
from muonscope.contract.run_spec import RunSpec

Answer = TypeVar("Answer")
Model = TypeVar("Model", bound=BaseModel)

Spec = RunSpec | Mapping[str, Any]
"""A RunSpec, or the JSON of one: the service validates it either way."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request and the reading of its answer."""

    method: str
    path: str
    parse: Callable[[Any], Answer]
    """Takes the decoded JSON, or the text where `is_text`."""
    params: Mapping[str, str | int] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = True
    """Whether sending it twice has the effect of sending it once."""
    is_text: bool = False
    tells_new: bool = False
    """Whether `parse` takes a pair: what else it takes, and whether the call made it (201)."""


def submit_run(spec: Spec, idempotency_key: str | None = None) -> Call[Run]:
    return Call(
        "POST",
        "/runs",
        Run.model_validate,
        body=_json_of(spec),
        headers=_once(idempotency_key),
    )


def validate_run(spec: Spec) -> Call[dict[str, Any]]:
    return Call("POST", "/runs/validate", dict, body=_json_of(spec))


def start_recording(spec: RunSpec) -> Call[RecordingStarted]:
    body = {"spec": _json_of(spec)}
    return Call("POST", "/recordings", RecordingStarted.model_validate, body=body, is_repeatable=False)


def import_run(record: RunRecord) -> Call[tuple[Run, bool]]:
    """Answered by the run that the record is now, and whether it was none before."""
    body = record.model_dump(mode="json", exclude_none=True)
    return Call("POST", "/imports/runs", _run_and_newness, body=body, is_repeatable=False, tells_new=True)


def _run_and_newness(answer: tuple[Any, bool]) -> tuple[Run, bool]:
    return Run.model_validate(answer[0]), answer[1]


def get_run(run_id: str) -> Call[Run]:
    return Call("GET", f"/runs/{_segment(run_id)}", Run.model_validate)


def list_runs(
    query: str | None = None, sort: str | None = None, cursor: str | int | None = None, limit: int | None = None
) -> Call[Page[Run]]:
    params = _given(q=query, sort=sort, cursor=cursor, limit=limit)
    return Call("GET", "/runs", _page_of(Run, "runs"), params=params)


def stop_run(run_id: str) -> Call[Run]:
    return Call("POST", f"/runs/{_segment(run_id)}/stop", Run.model_validate)


def retry_run(run_id: str) -> Call[Run]:
    return Call("POST", f"/runs/{_segment(run_id)}/retry", Run.model_validate, is_repeatable=False)


def tag_run(run_id: str, add: Sequence[str], remove: Sequence[str]) -> Call[Run]:
    body = {"add_tags": list(add), "remove_tags": list(remove)}
    return Call("PATCH", f"/runs/{_segment(run_id)}", Run.model_validate, body=body)


def clone_run(run_id: str, idempotency_key: str | None = None) -> Call[Run]:
    path = f"/runs/{_segment(run_id)}/clone"
    return Call("POST", path, Run.model_validate, headers=_once(idempotency_key))


def list_steps(
    run_id: str, start: int | None = None, stop: int | None = None, limit: int | None = None
) -> Call[Page[Step]]:
    params = _given(start=start, stop=stop, limit=limit)
    parse = _page_of(Step, "steps", cursor_key="next_start")
    return Call("GET", f"/runs/{_segment(run_id)}/steps", parse, params=params)


def download_steps(run_id: str, start: int | None = None, stop: int | None = None) -> Call[str]:
    """Every step as CSV, for a reader that takes it piece by piece."""
    params = {"format": "csv", **_given(start=start, stop=stop)}
    return Call("GET", f"/runs/{_segment(run_id)}/steps", str, params=params, is_text=True)


def get_series(run_id: str, fields: Sequence[str], max_points: int) -> Call[Series]:
    params = _given(max_points=max_points, fields=",".join(fields) or None)
    return Call("GET", f"/runs/{_segment(run_id)}/steps", Series.model_validate, params=params)


def list_parameters(run_id: str) -> Call[Page[Parameter]]:
    return Call("GET", f"/runs/{_segment(run_id)}/parameters", _page_of(Parameter, "parameters"))


def list_parameter_steps(run_id: str, index: int, start: int | None = None) -> Call[Page[ParameterStep]]:
    path = f"/runs/{_segment(run_id)}/parameters/{index}/steps"
    return Call("GET", path, _page_of(ParameterStep, "steps", cursor_key="next_start"), params=_given(start=start))


def get_parameter_series(run_id: str, index: int, max_points: int) -> Call[Series]:
    path = f"/runs/{_segment(run_id)}/parameters/{index}/steps"
    return Call("GET", path, Series.model_validate, params=_given(max_points=max_points))


def list_events(run_id: str, after: int = 0) -> Call[list[HistoryEvent]]:
    def parse(answer: Any) -> list[HistoryEvent]:
        return [HistoryEvent.model_validate(event) for event in answer["events"]]

    return Call("GET", f"/runs/{_segment(run_id)}/events", parse, params={"after": after})


def stream_events(run_id: str | None) -> Call[Event]:
    """A run's events as they come; every run's where `run_id` is None."""
    path = "/events" if run_id is None else f"/runs/{_segment(run_id)}/events"
    return Call("GET", path, Event.model_validate, headers={"Accept": "text/event-stream"})


def get_logs(run_id: str, rank: int | None = None) -> Call[str]:
    return Call("GET", f"/runs/{_segment(run_id)}/logs", str, params=_given(rank=rank), is_text=True)


def compare_runs(run_a: str, run_b: str) -> Call[Comparison]:
    return Call("GET", "/compare", Comparison.model_validate, params={"a": run_a, "b": run_b})


def create_experiment(name: str, base: Spec, matrix: Mapping[str, Sequence[Any]]) -> Call[Experiment]:
    body = {"name": name, "base": _json_of(base), "matrix": {key: list(values) for key, values in matrix.items()}}
    return _create_experiment(body)


def create_builtin_experiment(name: str, options: Mapping[str, Any]) -> Call[Experiment]:
    return _create_experiment({"builtin": name, **options})


def _create_experiment(body: dict[str, Any]) -> Call[Experiment]:
    return Call("POST", "/experiments", Experiment.model_validate, body=body, is_repeatable=False)


def list_experiments(cursor: str | int | None = None) -> Call[Page[Experiment]]:
    return Call("GET", "/experiments", _page_of(Experiment, "experiments"), params=_given(cursor=cursor))


def get_experiment(experiment_id: str) -> Call[Experiment]:
    return Call("GET", f"/experiments/{_segment(experiment_id)}", Experiment.model_validate)


def get_experiment_table(experiment_id: str, form: str) -> Call[str]:
    return Call("GET", f"/experiments/{_segment(experiment_id)}.{form}", str, is_text=True)


def get_queue() -> Call[dict[str, Any]]:
    return Call("GET", "/queue", dict)


def set_queue_mode(verb: str, why: str) -> Call[dict[str, Any]]:
    """Verb is pause, resume or drain."""
    return Call("POST", f"/queue/{verb}", dict, body={"why": why})


def set_queue_limit(kind: str, name: str, max_gpus: float | None) -> Call[dict[str, Any]]:
    """None takes the limit away."""
    path = f"/queue/limits/{kind}/{_segment(name)}"
    if max_gpus is None:
        return Call("DELETE", path, dict, is_repeatable=False)
    return Call("PUT", path, dict, body={"max_gpus": max_gpus})


def create_alert(name: str, url: str, when: Mapping[str, Any], tag: str | None) -> Call[Alert]:
    body = {"name": name, "url": url, "when": dict(when), "tag": tag}
    return Call("POST", "/alerts", Alert.model_validate, body=body, is_repeatable=False)


def list_alerts() -> Call[Page[Alert]]:
    return Call("GET", "/alerts", _page_of(Alert, "alerts"))


def delete_alert(alert_id: str) -> Call[None]:
    def parse(_: Any) -> None:
        return None

    return Call("DELETE", f"/alerts/{_segment(alert_id)}", parse, is_repeatable=False, is_text=True)


def send_test(alert_id: str) -> Call[Delivery]:
    return Call("POST", f"/alerts/{_segment(alert_id)}/test", Delivery.model_validate, is_repeatable=False)


def list_deliveries(alert_id: str, before: int | None = None, limit: int | None = None) -> Call[Page[Delivery]]:
    parse = _page_of(Delivery, "deliveries", cursor_key="next_before")
    return Call("GET", f"/alerts/{_segment(alert_id)}/deliveries", parse, params=_given(before=before, limit=limit))


def get_cluster() -> Call[dict[str, Any]]:
    return Call("GET", "/cluster", dict)


def get_readiness() -> Call[dict[str, Any]]:
    return Call("GET", "/readyz", dict)


def get_health() -> Call[dict[str, Any]]:
    return Call("GET", "/healthz", dict)


def _json_of(spec: Spec) -> dict[str, Any]:
    if not isinstance(spec, RunSpec):
        return dict(spec)
    # Only what was said: the service tells a default from a choice, and fills in its own defaults.
    said: dict[str, Any] = spec.model_dump(mode="json", exclude_unset=True)
    if "task" in said:
        said["task"]["name"] = spec.task.name
    return said


def _once(idempotency_key: str | None) -> dict[str, str]:
    """Make a repeat of this request answer with the first one's run."""
    return {"Idempotency-Key": idempotency_key or str(uuid4())}


def _segment(identifier: str) -> str:
    """Quote an opaque id, so that it stays one segment of the path whatever it holds."""
    if identifier in ("", ".", ".."):
        raise ValueError(f"{identifier!r} is not an id; `muonscope ls` shows them")
    return quote(identifier, safe="")


def _given(**params: str | int | None) -> dict[str, str | int]:
    return {key: value for key, value in params.items() if value is not None}


def _page_of(model: type[Model], key: str, cursor_key: str = "next_cursor") -> Callable[[Any], Page[Model]]:
    def parse(answer: Any) -> Page[Model]:
        return Page([model.model_validate(item) for item in answer[key]], answer.get(cursor_key))

    return parse
