"""Whether this machine's GPUs are seen: by NVIDIA's driver, by whoever runs here, and by torch."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muonscope.cli.findings import Finding, Level

TRIAL_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Driver:
    """What NVIDIA's driver says of itself."""

    names: tuple[str, ...]
    """Of its GPUs."""
    version: str = ""
    cuda: str = ""
    """The newest CUDA that it runs."""


def check_gpus() -> Finding:
    """Whether GPUs are seen by the driver, by whoever runs here, and by torch."""
    driver = _read_driver()
    if not driver.names:
        return _no_gpu(len(_nvidia_cards()))
    found = f"{len(driver.names)} × {driver.names[0]}"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return Finding(
            "gpu", Level.WARN, f"{found}, and CUDA_VISIBLE_DEVICES={visible!r} hides them all",
            "unset CUDA_VISIBLE_DEVICES where Ray and the service are started",
        )  # fmt: skip
    tried = _try_torch()
    if tried.problem is None:
        return Finding("gpu", Level.OK, f"{found}, driver {driver.version}, torch for CUDA {tried.cuda}")
    return _mismatch(found, driver, tried)


def _no_gpu(cards: int) -> Finding:
    see = "`nvidia-smi` must list it; in a container, pass it in: docker run --gpus all"
    if cards:
        return Finding(
            "gpu", Level.WARN, f"{cards} NVIDIA card(s) in this machine, and no driver that answers: runs take the CPU",
            f"install or load NVIDIA's driver: {see}",
        )  # fmt: skip
    return Finding(
        "gpu",
        Level.NOTE,
        "none seen: runs take logical GPUs, gloo, and fp16 emulated on the CPU; labelled so",
        f"on a machine that has one, {see}",
    )


def _mismatch(found: str, driver: Driver, tried: "Tried") -> Finding:
    if not tried.torch:
        return Finding(
            "gpu", Level.FAIL, f"{found}, and torch did not come up beside them: {tried.problem}",
            'see what `python -c "import torch; print(torch.cuda.is_available())"` and `nvidia-smi` say here',
        )  # fmt: skip
    if tried.cuda is None:
        return Finding(
            "gpu", Level.FAIL, f"{found}, and torch {tried.torch} is a build for the CPU",
            f"install torch's build for CUDA {driver.cuda or '(see nvidia-smi)'} or older into this environment",
        )  # fmt: skip
    if driver.cuda and _major(tried.cuda) > _major(driver.cuda):
        return Finding(
            "gpu", Level.FAIL,
            f"{found}: torch {tried.torch} is for CUDA {tried.cuda}, driver {driver.version} goes up to {driver.cuda}",
            f"install a newer driver, or torch's build for CUDA {_major(driver.cuda)}",
        )  # fmt: skip
    return Finding(
        "gpu", Level.FAIL, f"{found}, and torch {tried.torch} cannot compute on them: {tried.problem}",
        "see what `python -m torch.utils.collect_env` and `nvidia-smi` say; a driver that was replaced wants a reboot",
    )  # fmt: skip


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _read_driver() -> Driver:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Driver(())
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return Driver(
            tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles),
            str(pynvml.nvmlSystemGetDriverVersion()),
            f"{cuda // 1000}.{cuda % 1000 // 10}",
        )
    finally:
        pynvml.nvmlShutdown()


def _nvidia_cards(devices: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """The PCI addresses of NVIDIA's graphics cards and accelerators, with a driver or without."""
    return [
        folder.name
        for folder in (sorted(devices.iterdir()) if devices.is_dir() else [])
        if _reads(folder / "vendor", "0x10de") and _reads(folder / "class", "0x03")
    ]


def _reads(file: Path, beginning: str) -> bool:
    try:
        return file.read_text().startswith(beginning)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Tried:
    """How it went when torch was to compute on a GPU."""

    torch: str
    """Its version; empty where it did not get so far as to say it."""
    cuda: str | None
    """What it is built for; None is the CPU alone, or not known."""
    problem: str | None


_TRIAL: Final = """
import json, torch
print(json.dumps([torch.__version__, torch.version.cuda]), flush=True)
torch.ones(8, device="cuda").half().sum().item()
"""


def _try_torch() -> Tried:
    """Have a process of its own compute on the first GPU: whether it can is all that versions would tell, and more."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Tried("", None, f"no answer in {TRIAL_TIMEOUT_S:g} s")
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    if not done.stdout:
        return Tried("", None, said[-1])
    version, cuda = json.loads(done.stdout.splitlines()[0])
    return Tried(version, cuda, None if done.returncode == 0 else said[-1])
