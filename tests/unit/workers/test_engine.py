"""RunSpec in DeepSpeed's words; nothing is built here."""

import pytest

from muonscope.contract.run_spec import RunSpec
from workers.engine import deepspeed_config, merged


def test_a_batch_is_said_once_and_completely() -> None:
    config = deepspeed_config(RunSpec(micro_batch_size=4, gradient_accumulation_steps=3, world_size=2))

    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 3
    assert "train_batch_size" not in config


def test_clipping_is_off_unless_asked_for() -> None:
    assert deepspeed_config(RunSpec())["gradient_clipping"] == 0.0
    assert deepspeed_config(RunSpec(gradient_clipping=1.5))["gradient_clipping"] == 1.5


def test_the_loss_scale_is_dynamic_unless_static() -> None:
    dynamic = deepspeed_config(RunSpec.model_validate({"loss_scale": {"initial_power": 9, "window": 7}}))["fp16"]
    static = deepspeed_config(RunSpec.model_validate({"loss_scale": {"static": 128.0}}))["fp16"]

    assert (dynamic["loss_scale"], dynamic["initial_scale_power"], dynamic["loss_scale_window"]) == (0, 9, 7)
    assert static["loss_scale"] == 128.0


@pytest.mark.parametrize(("precision", "key"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp32", None)])
def test_each_precision_switches_on_its_own_block(precision: str, key: str | None) -> None:
    config = deepspeed_config(RunSpec.model_validate({"precision": precision}))

    assert [name for name in ("fp16", "bf16") if name in config] == ([] if key is None else [key])


def test_deepspeeds_own_muon_gets_its_block_with_adams_rate() -> None:
    spec = RunSpec.model_validate(
        {
            "implementation": "deepspeed",
            "step_ordering": "deferred",
            "optimizer": {"lr": 0.1, "momentum": 0.8, "adam": {"lr": 0.01}},
        }
    )
    block = deepspeed_config(spec)["optimizer"]

    assert block["type"] == "Muon"
    assert (block["params"]["lr"], block["params"]["momentum"], block["params"]["adam_lr"]) == (0.1, 0.8, 0.01)


def test_our_optimizer_is_not_deepspeeds_to_build() -> None:
    assert "optimizer" not in deepspeed_config(RunSpec())


def test_raw_settings_are_laid_upon_ours_key_by_key() -> None:
    assert merged({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 5}, "b": 4, "c": 6}) == {
        "a": {"x": 1, "y": 5},
        "b": 4,
        "c": 6,
    }


@pytest.mark.parametrize(("version", "knows"), [("0.18.9", False), ("0.19.0", True)])
def test_a_release_is_given_no_key_that_its_muon_does_not_know(version: str, knows: bool) -> None:
    config = deepspeed_config(RunSpec.model_validate({"deepspeed": {"version": version}}))

    assert ("ns_method" in config["optimizer"]["params"]) is knows
