"""What a worker group would send, over HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from muonscope.contract.telemetry import StepRecord
from service.store.session import Database
from tests.records import TOKEN, body_of, discarded_record, norms, queue_run, spec, start_attempt, step_record

NAN, INF = float("nan"), float("inf")
PARAMETERS = [
    {"index": 0, "name": "layers.0.weight", "shape": [4, 4], "route": "muon", "reason": "a matrix"},
    {"index": 1, "name": "layers.0.bias", "shape": [4], "route": "adamw", "reason": "a vector"},
]
MOVED = {
    "parameters_moved": 2, "parameters_total": 2, "muon_parameters_moved": 1, "muon_parameters_total": 1,
    "max_weight_motion": 0.45, "nonfinite_parameters": 0, "peak_memory_bytes": 1000,
    "final_parameters_hash": "f",
}  # fmt: skip
UNMOVED = {**MOVED, "parameters_moved": 0, "muon_parameters_moved": 0, "max_weight_motion": 0.0}


@dataclass
class Workers:
    """One enrolled attempt's voice."""

    client: httpx.Client
    run_id: str
    attempt_id: str
    token: str = TOKEN
    epoch: int = 1

    def post(self, message: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        if isinstance(body, bytes):
            options["content"] = body
        else:
            options["json"] = body
        return self.client.post(f"/attempts/{self.attempt_id}/{message}", headers=headers, **options)

    def steps(self, records: Sequence[StepRecord], *, rank: int = 0) -> httpx.Response:
        return self.post("steps", body_of(records, epoch=self.epoch, rank=rank))

    def outcome(self, status: str, declared: int, **rest: Any) -> httpx.Response:
        return self.post("outcome", {"status": status, "declared_steps": declared, **rest})

    def run(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get(f"/runs/{self.run_id}").json()
        return answer


def workers(client: httpx.Client, database: Database, **changes: Any) -> Workers:
    """Queue a run, begin its first attempt and give its workers' voice."""
    run_id = queue_run(database, spec(**changes))
    return Workers(client, run_id, start_attempt(database, run_id))


def next_workers(before: Workers, database: Database, *, first_step: int = 0) -> Workers:
    """Begin the run's next attempt."""
    attempt_id = start_attempt(database, before.run_id, first_step=first_step)
    return Workers(before.client, before.run_id, attempt_id, epoch=before.epoch + 1)


def train(voice: Workers, steps: int = 30, **final: Any) -> None:
    """A whole run that trains; `final` is added to what it says of its end."""
    voice.post("facts", {"parameters": PARAMETERS, "momentum_unit": "unscaled", "data_hash": "d",
                         "initial_parameters_hash": "i", "phases": {"first_step": 1.0}})  # fmt: skip
    voice.steps([step_record(step, loss=3.0 - step / 100) for step in range(steps)])
    assert voice.outcome("succeeded", steps, final={**MOVED, **final}).status_code == 204


def die(voice: Workers) -> None:
    """The published death: the momentum is poisoned at step 0 and 17 steps are discarded."""
    voice.post("facts", {"parameters": PARAMETERS, "momentum_unit": "unscaled", "data_hash": "d",
                         "initial_parameters_hash": "i", "phases": {"first_step": 1.0}})  # fmt: skip
    scales = [65536.0, 65536.0, *(65536.0 / 2**k for k in range(1, 17))]
    voice.steps(
        [
            discarded_record(
                step, loss_scale_before=scales[step], loss_scale_after=scales[step + 1], loss=3.0, update_norm=None,
                momentum_norm=INF if step == 0 else NAN, parameter_norms=norms(INF if step == 0 else NAN, 0.0),
            )
            for step in range(17)
        ]
    )  # fmt: skip
    failure = {
        "kind": "loss_scale_exhausted",
        "rank": 0,
        "step": 17,
        "message": "Current loss scale already at minimum",
    }
    assert voice.outcome("failed", 17, failure=failure, final=UNMOVED).status_code == 204
