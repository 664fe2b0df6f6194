"""What the doctor says of GPUs: none, one without a driver, hidden ones, and a torch that cannot use them."""

from pathlib import Path

import pytest
import torch

from muonscope.cli import gpu_checks
from muonscope.cli.findings import Level
from muonscope.cli.gpu_checks import Driver, Tried, check_gpus

H200 = Driver(("NVIDIA H200", "NVIDIA H200"), "550.54", "12.4")
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is found without a GPU")


def card(devices: Path, address: str, vendor: str, kind: str) -> None:
    (devices / address).mkdir(parents=True)
    (devices / address / "vendor").write_text(f"{vendor}\n")
    (devices / address / "class").write_text(f"{kind}\n")


@no_gpu_here
def test_a_machine_without_a_gpu_is_fine_and_is_told_what_to_do_if_it_has_one() -> None:
    finding = check_gpus()

    assert finding.level is Level.NOTE
    assert "none seen" in finding.found
    assert "nvidia-smi" in finding.remedy


def test_a_card_without_a_driver_is_found_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    card(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # its sound
    card(tmp_path, "0000:02:00.0", "0x8086", "0x030000")
    cards, without_a_bus = gpu_checks._nvidia_cards(tmp_path), gpu_checks._nvidia_cards(tmp_path / "no bus")
    monkeypatch.setattr(gpu_checks, "_nvidia_cards", lambda: cards)
    monkeypatch.setattr(gpu_checks, "_read_driver", lambda: Driver(()))

    finding = check_gpus()

    assert cards == ["0000:01:00.0"]
    assert without_a_bus == []
    assert finding.level is Level.WARN
    assert "install or load NVIDIA's driver" in finding.remedy


@pytest.mark.parametrize(("visible", "level"), [("", Level.WARN), ("-1", Level.WARN), ("1", Level.OK)])
def test_gpus_that_are_hidden_are_found(visible: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "_read_driver", lambda: H200)
    monkeypatch.setattr(gpu_checks, "_try_torch", lambda: Tried("2.13.0+cu126", "12.6", None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    finding = check_gpus()

    assert finding.level is level
    assert ("unset CUDA_VISIBLE_DEVICES" in finding.remedy) == (level is Level.WARN)


@no_gpu_here
def test_a_torch_that_is_no_cuda_build_is_tried_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "_read_driver", lambda: H200)

    finding = check_gpus()

    assert finding.level is Level.FAIL
    assert f"torch {torch.__version__} is a build for the CPU" in finding.found
    assert "12.4" in finding.remedy


@pytest.mark.parametrize(
    ("tried", "found", "remedy"),
    [
        (
            Tried("2.13.0+cu130", "13.0", "driver too old"),
            "for CUDA 13.0, driver 550.54 goes up to 12.4",
            "newer driver",
        ),
        # Within one major version an older driver does.
        (Tried("2.13.0+cu126", "12.6", "no kernel image"), "cannot compute on them: no kernel image", "collect_env"),
    ],
)
def test_a_driver_and_a_torch_that_do_not_go_together_are_found(
    tried: Tried, found: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "_read_driver", lambda: H200)
    monkeypatch.setattr(gpu_checks, "_try_torch", lambda: tried)

    finding = check_gpus()

    assert finding.level is Level.FAIL
    assert found in finding.found
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("timeout_s", "trial", "found"),
    [(0.01, gpu_checks._TRIAL, "no answer in 0.01 s"), (60.0, "import nonsense", "No module named 'nonsense'")],
)
def test_a_torch_that_does_not_come_up_is_a_finding_too(
    timeout_s: float, trial: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "_read_driver", lambda: H200)
    monkeypatch.setattr(gpu_checks, "TRIAL_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(gpu_checks, "_TRIAL", trial)

    finding = check_gpus()

    assert finding.level is Level.FAIL
    assert "2 × NVIDIA H200, and torch did not come up" in finding.found
    assert found in finding.found
