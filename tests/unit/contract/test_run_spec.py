"""RunSpec: what is refused, why, and what the fingerprint covers."""

import hashlib
import json
from typing import Any

import pytest
from pydantic import ValidationError

from muonscope.contract import run_spec
from muonscope.contract.run_spec import FIELDS_WITHOUT_NUMBERS, SUPPORTED_ORDERINGS, RunSpec, unsupported_reason
from muonscope.contract.status import Implementation, StepOrdering


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(fields)
    error = caught.value.errors()[0]
    return ".".join(str(part) for part in error["loc"]) + ": " + error["msg"]


def test_the_defaults_are_an_ordered_fp16_run_that_never_clips() -> None:
    spec = RunSpec()

    assert spec.step_ordering is StepOrdering.ORDERED
    assert spec.gradient_clipping == 0
    assert spec.loss_scale.initial_power == 16


def test_a_spec_survives_json() -> None:
    spec = RunSpec.model_validate({"task": {"name": "calm_boom"}, "tags": ["a"], "loss_scale": {"initial_power": 4}})

    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gradient_clipp1ng": 1}, "gradient_clipp1ng: Extra inputs"),
        ({"zero_stage": 7}, "zero_stage: Input should be less than or equal to 3"),
        ({"world_size": 0}, "world_size: Input should be greater"),
        ({"steps": -1}, "steps: Input should be greater"),
        ({"loss_scale": {"initial_power": -1}}, "loss_scale.initial_power: Input should be greater"),
        ({"loss_scale": {"hysteresis": 0}}, "loss_scale.hysteresis: Input should be greater"),
        ({"gradient_clipping": "auto"}, "gradient_clipping: Input should be a valid number"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: Input should be a finite number"),
        ({"task": {"name": "nope"}}, "task: task.name must be one of simple_model"),
        ({"task": {"name": "byte_gpt", "hidden_size": 10, "num_heads": 4}}, "num_heads=4 does not divide"),
        ({"name": " "}, "name: Value error, must not be blank"),
        ({"name": "a\x00b"}, "NUL"),
        ({"name": "\ud800"}, ""),
        ({"deepspeed": {"version": "0.1.0"}}, "not on the allow-list"),
        ({"ds_config": {"train_batch_size": 8}}, "ds_config.train_batch_size is set by the run's own"),
        ({"ds_config": {"zero_optimization": {"stage": 2}}}, "set by zero_stage"),
        ({"ds_config": {"zero_optimization": 5}}, "ds_config.zero_optimization=5 is not an object"),
        ({"ds_config": {"zero_optimization": None}}, "ds_config.zero_optimization=None is not an object"),
        ({"ds_config": {"a": 10**30}}, "does not fit in 64 bits"),
        ({"faults": [{"kind": "inf", "step": 0, "rank": 1}]}, "faults[0].rank=1 does not exist at world_size=1; use 0"),
        ({"faults": [{"kind": "inf", "step": 0, "micro_batch": 1}]}, "faults[0].micro_batch=1 does not exist"),
        ({"steps": 4, "faults": [{"kind": "inf", "step": 4}]}, "steps=4 begin at 0; use 0 to 3"),
        ({"loss_scale": {"static": 8}, "precision": "bf16"}, "needs precision=fp16"),
    ],
)
def test_what_cannot_run_is_refused_by_name(fields: dict[str, Any], expected: str) -> None:
    assert expected in refusal(**fields)


def test_an_ordering_that_an_implementation_lacks_is_refused_with_the_choices() -> None:
    message = refusal(implementation="deepspeed", zero_stage=3, step_ordering="master")

    assert "step_ordering=master is not available with implementation=deepspeed at zero_stage=3" in message
    assert "deferred" in message


@pytest.mark.parametrize("scope", ["gradient", "update", "muon_exempt"])
def test_every_clip_scope_runs_on_our_arithmetic(scope: str) -> None:
    spec = RunSpec.model_validate({"clip_scope": scope, "gradient_clipping": 1.0})

    assert unsupported_reason(spec) is None


@pytest.mark.parametrize(
    ("device", "ordering", "expected"),
    [
        ("cpu", "ordered", None),
        ("none", "master", None),
        ("cpu", "master", "step_ordering=master is not available with offload_optimizer"),
        ("nvme", "ordered", "offload_optimizer.device=nvme is not available"),
    ],
)
def test_offload_is_refused_only_where_it_cannot_be_right(device: str, ordering: str, expected: str | None) -> None:
    fields = {"step_ordering": ordering, "ds_config": {"zero_optimization": {"offload_optimizer": {"device": device}}}}

    if expected is None:
        assert RunSpec.model_validate(fields).step_ordering == ordering
    else:
        assert expected in refusal(**fields)


def test_every_implementation_and_stage_offers_something() -> None:
    assert all(SUPPORTED_ORDERINGS[implementation, stage] for implementation in Implementation for stage in (1, 2, 3))


def test_naming_a_release_implies_its_own_implementation() -> None:
    spec = RunSpec.model_validate({"deepspeed": {"version": "0.19.8"}, "step_ordering": "deferred"})

    assert spec.implementation is Implementation.DEEPSPEED


CHANGES: dict[str, Any] = {
    "working_dir": "gcs://_ray_pkg_0123456789abcdef.zip",
    "task": {"name": "calm_boom"},
    "step_ordering": "master",
    "implementation": "deepspeed",
    "zero_stage": 2,
    "world_size": 2,
    "precision": "bf16",
    "loss_scale": {"initial_power": 3},
    "optimizer": {"lr": 0.5},
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 7,
    "gradient_clipping": 1.0,
    "clip_scope": "update",
    "steps": 31,
    "stop_after_discarded_steps": 9,
    "seed": 1,
    "faults": [{"kind": "nan", "step": 3}],
    "deepspeed": {"version": "0.19.8"},
    "ds_config": {"steps_per_print": 5},
}
SAME: dict[str, Any] = {
    "name": "other",
    "tags": ["t"],
    "notes": "n",
    "priority": 3,
    "checkpoint": {"every_steps": 5},
    "resources": {"gpus_per_rank": 0.5},
}


@pytest.mark.parametrize("field", sorted(RunSpec.model_fields))
def test_the_fingerprint_covers_exactly_what_can_change_the_numbers(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hash alone is asked about here, so any combination may be built.
    monkeypatch.setattr(run_spec, "unsupported_reason", lambda spec: None)
    changed = RunSpec.model_validate({field: (CHANGES | SAME)[field]})

    assert (changed.fingerprint() == RunSpec().fingerprint()) is (field in FIELDS_WITHOUT_NUMBERS)


def test_a_spec_without_the_younger_fields_keeps_the_fingerprint_it_had_before_there_were_any() -> None:
    numbers = RunSpec().model_dump(mode="json", exclude=FIELDS_WITHOUT_NUMBERS)
    del numbers["optimizer"]["schedule"], numbers["working_dir"]
    canonical = json.dumps(numbers, sort_keys=True, separators=(",", ":"))

    assert RunSpec().fingerprint() == hashlib.sha256(canonical.encode()).hexdigest()
    assert RunSpec.model_validate({"optimizer": {"schedule": {}}}).fingerprint() != RunSpec().fingerprint()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"zero_stage": True}, "zero_stage"),
        ({"zero_stage": "1"}, "zero_stage"),
        ({"steps": "30"}, "steps"),
        ({"priority": False}, "priority"),
        ({"checkpoint": {"every_steps": True}}, "every_steps"),
        ({"loss_scale": {"window": "4"}}, "window"),
        ({"faults": [{"kind": "inf", "step": "3"}]}, "step"),
        ({"task": {"name": "byte_gpt", "num_layers": True}}, "num_layers"),
    ],
)
def test_an_integer_is_neither_a_switch_nor_a_text(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(fields)

    (error,) = refused.value.errors()
    assert error["loc"][-1] == field
    assert "is no integer; give an integer" in error["msg"]


def test_a_number_is_no_switch_and_may_be_written_as_yaml_reads_it() -> None:
    assert "is no number; give a number" in refusal(gradient_clipping=True)
    assert RunSpec.model_validate({"optimizer": {"lr": "1e-3"}, "steps": 30.0}).steps == 30
