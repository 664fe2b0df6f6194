"""A `ds_config` that DeepSpeed would ignore or refuse is refused at submission, with the remedy.

Cases E01 to E18 of the shared list: what DeepSpeed 0.19.8 does with each was measured on its CPU build.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from muonscope.contract.run_spec import RunSpec


def refused(**spec: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(spec)
    return str(caught.value)


def zero(**fields: Any) -> dict[str, Any]:
    return {"ds_config": {"zero_optimization": fields}}


def test_e01_batch_sizes_are_the_runs_own_and_never_auto() -> None:
    assert "micro_batch_size" in refused(ds_config={"train_batch_size": "auto"})
    assert "micro_batch_size" in refused(ds_config={"train_micro_batch_size_per_gpu": "auto"})
    assert "integer" in refused(gradient_accumulation_steps="auto")


def test_e03_clipping_is_a_number_where_deepspeed_would_fail_at_the_first_step() -> None:
    assert "gradient_clipping" in refused(gradient_clipping="auto")
    assert "the run's own gradient_clipping" in refused(ds_config={"gradient_clipping": "auto"})
    assert RunSpec(gradient_clipping=1.0).gradient_clipping == 1.0


def test_e04_precision_is_a_word_and_not_two_switches() -> None:
    assert "the run's own precision" in refused(ds_config={"bf16": {"enabled": "true"}})
    assert "the run's own precision" in refused(ds_config={"fp16": {"enabled": "auto"}})


def test_e05_fp16_and_bf16_cannot_both_be_asked_for() -> None:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert "the run's own precision" in refused(ds_config=both)


def test_e07_batch_sizes_cannot_contradict_each_other() -> None:
    spec = RunSpec(micro_batch_size=2, gradient_accumulation_steps=18, world_size=7)
    assert "train_batch_size" not in spec.ds_config
    assert "micro_batch_size, gradient_accumulation_steps and world_size" in refused(ds_config={"train_batch_size": 8})


@pytest.mark.parametrize("value", [500_000_000, 5e8, "auto", None, "500000000"])
def test_e10_a_whole_bucket_size_is_taken(value: Any) -> None:
    RunSpec.model_validate(zero(stage3_prefetch_bucket_size=value))


@pytest.mark.parametrize("value", ["5e8", 3774873.6, "big", [1]])
def test_e10_any_other_bucket_size_is_refused(value: Any) -> None:
    said = refused(**zero(stage3_prefetch_bucket_size=value))
    assert "ds_config.zero_optimization.stage3_prefetch_bucket_size" in said
    assert "is not a whole number" in said


def test_e11_a_key_that_deepspeed_would_ignore_is_refused_with_the_one_that_was_meant() -> None:
    said = refused(ds_config={"wall_clock_brakedown": True})
    assert "ds_config.wall_clock_brakedown is no key of DeepSpeed 0.19.8's, which would ignore it" in said
    assert "did you mean wall_clock_breakdown?" in said
    assert "did you mean gradient_clipping?" in refused(ds_config={"gradient_clipp1ng": 1})
    assert "remove it" in refused(ds_config={"my_own_thing": 1})


def test_e11_unknown_keys_of_a_section_are_refused_before_deepspeed_does() -> None:
    assert "ds_config.zero_optimization.foo_bar is no key" in refused(**zero(foo_bar=1))
    assert "did you mean pin_memory?" in refused(**zero(offload_optimizer={"device": "cpu", "pin_memry": True}))


@pytest.mark.parametrize("minimum", [1e-10, 0.5, 0])
def test_e14_a_minimum_loss_scale_below_one_is_refused(minimum: float) -> None:
    assert "loss_scale.minimum" in refused(loss_scale={"minimum": minimum})


def test_b02_a_hysteresis_of_zero_is_refused_where_deepspeed_would_never_lower_the_scale() -> None:
    assert "loss_scale.hysteresis" in refused(loss_scale={"hysteresis": 0})


def test_e18_removed_and_deprecated_keys() -> None:
    assert "set precision instead" in refused(ds_config={"amp": {"enabled": True}})
    assert "zero_stage" in refused(**zero(stage="2"))
    assert "zero_stage" in refused(zero_stage=4)
    RunSpec.model_validate(zero(cpu_offload=False))


def test_auto_is_a_sections_word_and_no_top_level_value() -> None:
    assert "ds_config.steps_per_print='auto' means nothing to DeepSpeed itself" in refused(
        ds_config={"steps_per_print": "auto"}
    )
    RunSpec.model_validate(zero(reduce_bucket_size="auto"))


@pytest.mark.parametrize(("value", "is_taken"), [(True, True), ("true", True), (1, True), ("maybe", False), (2, False)])
def test_switches_are_what_pydantic_takes_for_one(value: Any, is_taken: bool) -> None:
    spec = zero(overlap_comm=value)
    if is_taken:
        RunSpec.model_validate(spec)
    else:
        assert "is not true or false" in refused(**spec)


def test_an_older_release_says_itself_what_it_takes() -> None:
    spec = {"deepspeed": {"version": "0.19.2"}, "step_ordering": "master", "ds_config": {"a_key_of_its_own": 1}}
    RunSpec.model_validate(spec)
    assert "is no key of DeepSpeed" in refused(ds_config={"a_key_of_its_own": 1})
