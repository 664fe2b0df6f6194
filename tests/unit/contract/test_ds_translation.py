"""DeepSpeed's own configuration in a spec's words: nothing is dropped without a line that says so."""

from typing import Any

import pytest

from muonscope.contract.ds_translation import is_deepspeeds_own, translate
from muonscope.contract.run_spec import RunSpec

WHOLE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 1, "auto_cast": False},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 0.01, "betas": [0.8, 0.99], "adam_lr": 1e-3, "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "warmup_num_steps": 5}},
    "wall_clock_breakdown": False,
}


def test_a_whole_configuration_is_a_spec_that_validates() -> None:
    spec = RunSpec.model_validate(translate(WHOLE).spec)

    assert (spec.world_size, spec.micro_batch_size, spec.gradient_accumulation_steps) == (2, 8, 4)
    assert (spec.precision, spec.loss_scale.initial_power, spec.loss_scale.static) == ("fp16", 12, None)
    assert (spec.zero_stage, spec.gradient_clipping) == (2, 0.5)
    assert (spec.optimizer.lr, spec.optimizer.adam.beta1, spec.optimizer.adam.lr) == (0.01, 0.8, 1e-3)
    assert spec.optimizer.schedule is not None
    assert (spec.optimizer.schedule.warmup_steps, spec.optimizer.schedule.decay) == (5, "linear")
    assert spec.ds_config == {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": False}


def test_every_key_has_its_line() -> None:
    report = "\n".join(translate(WHOLE).report)

    assert [key for key in WHOLE if key not in report] == []
    assert "fp16.auto_cast: left out" in report


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, 'left out, "auto" says nothing'),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "say world_size"),
        ({"zero_optimization": {"stage": 0}}, "stage: left out"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}, "Adam is not Muon"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler: left out"),
        ({"fp16": {"enabled": False}}, "not enabled"),
    ],
)
def test_what_has_no_place_is_left_out_with_the_reason(config: dict[str, Any], line: str) -> None:
    assert line in "\n".join(translate(config).report)


def test_what_deepspeed_does_where_nothing_is_said_is_said() -> None:
    translation = translate({"train_micro_batch_size_per_gpu": 2})

    assert translation.spec == {"micro_batch_size": 2, "gradient_clipping": 1.0, "precision": "fp32"}


@pytest.mark.parametrize(
    ("config", "is_its_own"),
    [({}, False), ({"wall_clock_breakdown": True}, False), ({"zero_optimization": {"overlap_comm": True}}, False),
     ({"zero_optimization": {"stage": 1}}, True), ({"fp16": {}}, True), (None, False)],
)  # fmt: skip
def test_a_specs_own_ds_config_is_told_from_deepspeeds(config: Any, is_its_own: bool) -> None:
    assert is_deepspeeds_own(config) is is_its_own
