"""What is refused at submission: each combination names its field, value and remedy, and its neighbour is accepted."""

from typing import Any

import pytest
from pydantic import ValidationError

from muonscope.contract.run_spec import RunSpec

NATIVE = {"implementation": "deepspeed", "step_ordering": "deferred"}


def zero(**settings: Any) -> dict[str, Any]:
    return {"ds_config": {"zero_optimization": settings}}


REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    # spec, what the refusal must say, what to change for it to be accepted
    ({**NATIVE, "optimizer": {"nesterov": False}}, "optimizer.nesterov=False", {"optimizer": {}}),
    ({**NATIVE, "optimizer": {"ns_steps": 6}}, "optimizer.ns_steps=6", {"optimizer": {"ns_steps": 5}}),
    (
        {**NATIVE, "optimizer": {"adam": {"weight_decay": 0.1}}},
        "optimizer.adam.weight_decay=0.1",
        {"optimizer": {"weight_decay": 0.1}},
    ),
    (
        {**NATIVE, "optimizer": {"ns_method": "polar_express"}},
        "optimizer.ns_method=polar_express",
        {"optimizer": {"ns_method": "standard"}},
    ),
    (
        {**NATIVE, "optimizer": {"schedule": {"counts_discarded_steps": True}}},
        "optimizer.schedule.counts_discarded_steps=True",
        {"implementation": "muon_core"},
    ),
    (
        {"steps": 10, "optimizer": {"schedule": {"warmup_steps": 10}}},
        "optimizer.schedule.warmup_steps=10",
        {"steps": 11},
    ),
    (zero(cpu_offload=True), "set offload_optimizer instead", zero(cpu_offload=False)),
    (zero(cpu_offload_param="on"), "set offload_param instead", zero(cpu_offload_param="off")),
    (zero(offload_param={"device": "cpu"}), "offload_param.device=cpu", zero(offload_param={"device": "none"})),
    (zero(offload_optimizer={"device": "nvme"}), "offload_optimizer.device=nvme", zero()),
    (
        {**NATIVE, **zero(offload_optimizer={"device": "cpu"})},
        "there its Muon runs where no ordering reaches it",
        {"implementation": "muon_core", "step_ordering": "ordered"},
    ),
    (
        {
            "ds_config": {
                "zero_force_ds_cpu_optimizer": True,
                "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
            }
        },
        "zero_force_ds_cpu_optimizer=True",
        {"ds_config": {"zero_force_ds_cpu_optimizer": True}},
    ),
    (zero(zenflow={"topk_ratio": 0.1}), "zenflow", zero(zenflow=None)),
    (
        {"ds_config": {"tensor_parallel": {"autotp_size": 2}}},
        "autotp_size=2",
        {"ds_config": {"tensor_parallel": {"autotp_size": 1}}},
    ),
    (
        {"precision": "fp32", "ds_config": {"torch_autocast": {"enabled": True, "dtype": "float16"}}},
        "torch_autocast.dtype=float16",
        {"ds_config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
    ),
    ({"ds_config": {"amp": {"enabled": True}}}, "amp.enabled=True", {"ds_config": {"amp": {"enabled": False}}}),
    (
        {"ds_config": {"zero_allow_untested_optimizer": False}},
        "zero_allow_untested_optimizer=False",
        {"ds_config": {"zero_allow_untested_optimizer": True}},
    ),
    (
        {"precision": "bf16", "ds_config": {"data_types": {"grad_accum_dtype": "fp32"}}},
        "BF16_Optimizer",
        {"zero_stage": 2},
    ),
    (
        {**NATIVE, "zero_stage": 3, **zero(reduce_scatter=True)},
        "reduce_scatter=True",
        {"implementation": "muon_core", "step_ordering": "ordered"},
    ),
    (
        {"step_ordering": "master", "ds_config": {"managed_gradient_accumulation": False}},
        "step_ordering=master must know",
        {"step_ordering": "ordered"},
    ),
]


@pytest.mark.parametrize(("spec", "says", "change"), REFUSED, ids=[says for _, says, _ in REFUSED])
def test_a_combination_that_cannot_run_is_refused_with_the_reason_and_its_neighbour_is_not(
    spec: dict[str, Any], says: str, change: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=r"remove|choose|leave|set|use|warm up|train") as caught:
        RunSpec.model_validate(spec)

    assert says in str(caught.value)
    RunSpec.model_validate({**spec, **change})
