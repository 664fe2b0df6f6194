"""DeepSpeed's own configuration in a spec's words: nothing is dropped without a line that says so."""

from typing import Any

import pytest
from pydantic import ValidationError

from muonscope.contract.ds_translation import contradiction, is_deepspeeds_own, translate
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
    assert "optimizer.type: Muon; implementation says whose" in report
    assert 'optimizer.params.weight_decay: left out, "auto" says nothing' in report


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, 'left out, "auto" says nothing'),
        ({"train_batch_size": 8}, "say world_size"),
        ({"gradient_clipping": "auto"}, "gradient_clipping (not said): gradient_clipping = 1.0"),
        ({"zero_optimization": False}, "stage: left out"),
        ({"zero_optimization": {"stage": 0}}, "stage: left out"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}, "Adam is not Muon"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler: left out"),
        ({"fp16": {"enabled": False}}, "not enabled"),
        ({"fp16": {"enabled": "auto"}}, 'fp16.enabled: left out, "auto" says nothing'),
        ({"fp16": {"enabled": "auto"}}, "(not said): precision = 'fp32'"),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
            "zero_optimization.reduce_bucket_size: left",
        ),
    ],
)
def test_what_has_no_place_is_left_out_with_the_reason(config: dict[str, Any], line: str) -> None:
    assert line in "\n".join(translate(config).report)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "on"}}, "enables both fp16 and bf16"),
        (
            {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 18},
            "256 is no multiple of micro_batch_size=2 times gradient_accumulation_steps=18, whatever the rest is",
        ),
        ({"train_batch_size": 8, "gradient_clipping": "1.0"}, "'1.0' is a text, at which DeepSpeed fails"),
        ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 3774873.6}}, "is not a whole number"),
        ({"zero_optimization": {"stage": 1, "foo_bar": 1}}, "zero_optimization.foo_bar is no key"),
        ({"train_batch_size": 8, "gradient_clipp1ng": 1}, "did you mean gradient_clipping?"),
        ({"fp16": {"enabled": True, "opt_level": "O2"}}, "fp16.opt_level is no key"),
        ({"fp16": {"enabled": True, "min_loss_scale": 1e-10}}, "min_loss_scale=1e-10 is not a whole number"),
    ],
)
def test_what_deepspeed_would_refuse_is_refused_by_its_name(config: dict[str, Any], reason: str) -> None:
    assert reason in (contradiction(config) or "")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"bf16": {"enabled": "true"}, "fp16": {"enabled": "false"}}, "precision", "bf16"),
        ({"bf16": {"enabled": "off"}, "fp16": {"enabled": "1"}}, "precision", "fp16"),
        ({"zero_optimization": {"stage": "2"}}, "zero_stage", 2),
        ({"zero_optimization": True}, "zero_stage", 1),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            "world_size", 4,
        ),
        ({"fp16": {"enabled": True, "min_loss_scale": "auto"}}, "precision", "fp16"),
    ],
)  # fmt: skip
def test_what_deepspeed_takes_is_understood_as_it_understands_it(
    config: dict[str, Any], field: str, value: object
) -> None:
    assert is_deepspeeds_own(config)
    assert contradiction(config) is None
    assert getattr(RunSpec.model_validate(translate(config).spec), field) == value


MICRO, ACCUMULATED = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "said", "field", "value"),
    [
        ({"train_batch_size": 8, MICRO: 2}, {"world_size": 2}, "gradient_accumulation_steps", 2),
        ({"train_batch_size": 8, MICRO: 2, ACCUMULATED: "auto"}, {"world_size": 4}, "gradient_accumulation_steps", 1),
        ({"train_batch_size": 16, ACCUMULATED: 2}, {"world_size": 2}, "micro_batch_size", 4),
        ({"train_batch_size": 16}, {"world_size": 2}, "micro_batch_size", 8),
        ({"train_batch_size": 8, MICRO: 2}, {"world_size": 2, "micro_batch_size": 4}, "gradient_accumulation_steps", 1),
        ({"train_batch_size": 8, MICRO: 2}, {}, "world_size", 4),
    ],
)  # fmt: skip
def test_a_batch_is_shared_out_over_the_ranks_that_the_spec_says(
    config: dict[str, Any], said: dict[str, Any], field: str, value: int
) -> None:
    assert contradiction(config, said) is None
    translation = translate(config, said)
    assert translation.spec[field] == value
    assert f"train_batch_size: {field} = {value}" in translation.report


@pytest.mark.parametrize(
    ("config", "said", "reason"),
    [
        (
            {"train_batch_size": 8, MICRO: 2, ACCUMULATED: 1}, {"world_size": 2},
            "8 is not micro_batch_size=2 times gradient_accumulation_steps=1 times world_size=2; correct one of them",
        ),
        ({"train_batch_size": 8, MICRO: 3}, {"world_size": 2}, "no multiple of micro_batch_size=3 times world_size=2"),
        ({"train_batch_size": 7}, {"world_size": 2}, "7 is no multiple of world_size=2"),
        ({"train_batch_size": 0}, {"world_size": 2}, "0 is no multiple of"),
    ],
)  # fmt: skip
def test_a_batch_that_the_ranks_cannot_share_is_refused_as_by_deepspeed(
    config: dict[str, Any], said: dict[str, Any], reason: str
) -> None:
    assert reason in (contradiction(config, said) or "")


def test_a_batch_that_agrees_with_all_three_is_left_out_for_they_say_it() -> None:
    config = {"train_batch_size": 8, MICRO: 2, ACCUMULATED: 2}

    assert contradiction(config, {"world_size": 2}) is None
    translation = translate(config, {"world_size": 2})
    assert "world_size" not in translation.spec
    assert "train_batch_size: left out, it is micro_batch_size times" in "\n".join(translation.report)


def test_another_release_says_itself_which_keys_it_takes() -> None:
    config = {"fp16": {"enabled": True, "opt_level": "O2"}}

    assert contradiction(config, release="0.17.6") is None
    assert contradiction({**config, "bf16": {"enabled": True}}, release="0.17.6")


def test_a_stage_that_there_is_none_of_is_left_to_be_refused() -> None:
    with pytest.raises(ValidationError, match="zero_stage"):
        RunSpec.model_validate(translate({"zero_optimization": {"stage": 4}}).spec)


def test_a_whole_configuration_contradicts_nothing() -> None:
    assert contradiction(WHOLE) is None


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
