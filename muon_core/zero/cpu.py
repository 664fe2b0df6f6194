"""Let fp16 training run under DeepSpeed on a machine without a GPU.

DeepSpeed refuses fp16 on processors without AMX-FP16, although torch computes it correctly on any, overflow at 65504
included. Runs on this accelerator are labelled "fp16 emulated on CPU" in their record.
"""

import os
from typing import Any

import torch


def install_cpu_accelerator() -> bool:
    """Install the accelerator unless a GPU will do the work; call before anything of DeepSpeed is initialised.

    Idempotent. `DS_ACCELERATOR=cpu` asks for the CPU on a machine that has a GPU.

    Returns:
        Whether training will run on the CPU, with fp16 emulated.
    """
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return False
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class FloatingPointCPU(CPU_Accelerator):
        is_muon_core_cpu = True

        def is_fp16_supported(self) -> bool:
            return True

        def create_op_builder(self, class_name: str) -> Any:
            # The shared-memory op is compiled at first use: a minute of g++, and a killed build leaves a lock on which
            # every later run hangs. Gloo does its work.
            return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    if not getattr(get_accelerator(), "is_muon_core_cpu", False):
        set_accelerator(FloatingPointCPU())
    return True
