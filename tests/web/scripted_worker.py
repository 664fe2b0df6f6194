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

    def __init__(self, client: httpx.Client, submission_id: str, enrolment_token: str, words: str = "scripted") -> None:
        """Enrol. `words` is what it says of itself wherever a worker group may say something."""
        self._words = words
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
        names = PARAMETERS if self._words == "scripted" else [*PARAMETERS[:-1], self._words]
        parameters = [
            {
                "index": index, "name": name, "shape": [128, 128] if name.endswith("weight") else [128],
                "route": "muon" if name.endswith("weight") else "adamw", "reason": self._words,
            }
            for index, name in enumerate(names)
        ]  # fmt: skip
        ranks = [{"rank": rank, "node": "here", "pid": 1 + rank, "device": self._words} for rank in (0, 1)]
        self._facts = {
            "parameters": parameters, "ranks": ranks, "data_hash": "d", "initial_parameters_hash": "p",
            "momentum_unit": "loss_scaled" if self._is_native else "unscaled",
            "environment": {"labels": [f"{self._words} emulation"]},
        }  # fmt: skip
        self._post("facts", self._facts, self._headers)
        self._post("heartbeat", {"status": "running"}, self._headers)

    def report_load(self, begun_at: float) -> None:
        """Ship two moments of both ranks' load, in the first and in the sixth step's time."""
        facts = {**self._facts, "phases": {"first_step": begun_at}}
        self._post("facts", facts, self._headers)
        samples = [
            {
                "rank": rank, "at": begun_at + 0.1 * moment, "cpu_percent": 90.0 + rank, "memory_bytes": 2**30,
                "node_cpu_percent": 50.0, "node_memory_bytes": 2**33, "node_memory_total_bytes": 2**36,
                "gpu_percent": 75.0 + 5 * moment, "gpu_memory_bytes": 3 * 2**30, "gpu_memory_total_bytes": 2**36,
            }
            for moment in (0, 1) for rank in (0, 1)
        ]  # fmt: skip
        self._post("load", {"samples": samples}, self._headers)

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
        failure = {"kind": "loss_scale_exhausted", "step": self._next, "message": self._words} if dies else None
        final = {
            "parameters_moved": 0 if dies else 10, "parameters_total": 10, "muon_parameters_moved": 0 if dies else 5,
            "muon_parameters_total": 5, "max_weight_motion": 0.0 if dies else 0.4548, "nonfinite_parameters": 0,
        }  # fmt: skip
        outcome = {
            "status": "failed" if dies else "succeeded", "declared_steps": self._next, "failure": failure,
            "final": final,
        }  # fmt: skip
        self._post("outcome", outcome, self._headers)

    def refuse(self) -> None:
        """End before the first step, with a configuration that cannot be trained."""
        self.fail("config_refused", self._words)

    def fail(self, kind: str, message: str) -> None:
        """End before the first step."""
        failure = {"kind": kind, "step": None, "message": message}
        self._post("outcome", {"status": "failed", "declared_steps": 0, "failure": failure}, self._headers)

    @property
    def _is_native(self) -> bool:
        return bool(self.spec["implementation"] == "deepspeed")

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
            momentum *= before if self._is_native else 1.0
            yield StepRecord(
                step=step, overflow=overflow, discarded=overflow, loss_scale_before=before,
                loss_scale_after=2.0**power, loss=4.0 * 0.9**step + 1.0, lr=0.05,
                grad_norm=math.inf if overflow else 2.0, update_norm=None if overflow else 1.0,
                momentum_norm=momentum, step_time_s=0.02, largest_parameter=0,
                nonfinite_parameters=0 if math.isfinite(momentum) else 10, ns_calls=0 if overflow else 5,
                parameter_norms=array("f", [momentum] * len(PARAMETERS)).tobytes(),
            )  # fmt: skip
