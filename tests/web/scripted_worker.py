"""An attempt's worker group as the controller sees it: the real messages over HTTP, with a record written by hand."""

import math
from array import array
from collections.abc import Iterator
from typing import Any

import httpx

from muonscope.contract.telemetry import StepRecord, encode_batch, encode_record

PARAMETERS = [f"linears.{layer}.{kind}" for layer in range(5) for kind in ("weight", "bias")]


class ScriptedWorker:
    """Plays one attempt: `SimpleModel`'s death under master, its recovery under ordered."""

    def __init__(self, client: httpx.Client, submission_id: str, enrolment_token: str) -> None:
        self._client = client
        self._path = f"/attempts/{submission_id}"
        enrolled = self._post("enrol", {"token": enrolment_token}).json()
        self.spec: dict[str, Any] = enrolled["spec"]
        self._epoch = enrolled["epoch"]
        self._headers = {"Authorization": f"Bearer {enrolled['token']}"}
        self._next = 0

    def _post(self, verb: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        answer = self._client.post(f"{self._path}/{verb}", json=body, headers=headers)
        answer.raise_for_status()
        return answer

    def tell_facts(self) -> None:
        parameters = [
            {
                "index": index, "name": name, "shape": [128, 128] if name.endswith("weight") else [128],
                "route": "muon" if name.endswith("weight") else "adamw", "reason": "scripted",
            }
            for index, name in enumerate(PARAMETERS)
        ]  # fmt: skip
        ranks = [{"rank": rank, "node": "here", "pid": 1 + rank, "device": "scripted"} for rank in (0, 1)]
        facts = {
            "parameters": parameters, "ranks": ranks, "momentum_unit": "unscaled", "data_hash": "d",
            "initial_parameters_hash": "p",
        }  # fmt: skip
        self._post("facts", facts, self._headers)
        self._post("heartbeat", {"status": "running"}, self._headers)

    def record(self, count: int) -> None:
        """Ship the next steps of the script."""
        records = [step for step in self._script() if step.step >= self._next][:count]
        body = encode_batch([encode_record(record) for record in records], epoch=self._epoch)
        self._client.post(f"{self._path}/steps", content=body, headers=self._headers).raise_for_status()
        self._next += len(records)

    def finish(self) -> None:
        """Ship what is left and end as the script ends."""
        self.record(self.spec["steps"])
        dies = self._dies
        failure = {"kind": "loss_scale_exhausted", "step": self._next, "message": "scripted"} if dies else None
        final = {
            "parameters_moved": 0 if dies else 10, "parameters_total": 10, "muon_parameters_moved": 0 if dies else 5,
            "muon_parameters_total": 5, "max_weight_motion": 0.0 if dies else 0.4548, "nonfinite_parameters": 0,
        }  # fmt: skip
        outcome = {
            "status": "failed" if dies else "succeeded", "declared_steps": self._next, "failure": failure,
            "final": final,
        }  # fmt: skip
        self._post("outcome", outcome, self._headers)

    @property
    def _dies(self) -> bool:
        return bool(self.spec["step_ordering"] == "master" and self.spec["loss_scale"]["initial_power"] > 8)

    def _script(self) -> Iterator[StepRecord]:
        power = self.spec["loss_scale"]["initial_power"]
        hysteresis = 2
        for step in range(self.spec["steps"]):
            overflow = self._dies or (power > 15 and step < 2)
            before = 2.0**power
            if overflow and hysteresis > 1:
                hysteresis -= 1
            elif overflow and power == 0:
                return
            elif overflow:
                power -= 1
            poisoned = math.inf if step == 0 else math.nan
            momentum = poisoned if self._dies else 0.0 if overflow else 3.2 - step / 100
            yield StepRecord(
                step=step, overflow=overflow, discarded=overflow, loss_scale_before=before,
                loss_scale_after=2.0**power, loss=4.0 * 0.9**step + 1.0, lr=0.05,
                grad_norm=math.inf if overflow else 2.0, update_norm=None if overflow else 1.0,
                momentum_norm=momentum, step_time_s=0.02, largest_parameter=0,
                nonfinite_parameters=0 if math.isfinite(momentum) else 10, ns_calls=0 if overflow else 5,
                parameter_norms=array("f", [momentum] * len(PARAMETERS)).tobytes(),
            )  # fmt: skip
