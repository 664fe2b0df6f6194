"""The dtype that a processor iterates in: what its flags say, what overrides them."""

from pathlib import Path

import pytest
import torch

from muon_core import orthogonalize, processor
from muon_core.newton_schulz import default_iteration_dtype
from muon_core.processor import choice_from, cpu_iteration_dtype, processor_flags

CPU = torch.device("cpu")


def cpuinfo(folder: Path, *flags: str) -> Path:
    path = folder / f"cpuinfo-{len(flags)}-{'-'.join(flags)}"
    second = "processor\t: 1\nflags\t\t: fpu amx_bf16\n"
    path.write_text(f"processor\t: 0\nmodel name\t: a processor\nflags\t\t: fpu {' '.join(flags)}\n\n{second}")
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("avx2", "fma"), torch.float32),
        (("avx512f", "avx512_vnni"), torch.float32),
        # Tiles without bfloat16 in them multiply small integers.
        (("amx_tile", "amx_int8"), torch.float32),
        (("avx512f", "avx512_bf16"), torch.bfloat16),
        (("avx512f", "amx_tile", "amx_bf16"), torch.bfloat16),
    ],
)
def test_the_first_processors_flags_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: torch.dtype
) -> None:
    found = processor_flags(cpuinfo(tmp_path, *flags))
    monkeypatch.setattr(processor, "processor_flags", lambda: found)
    monkeypatch.setattr(processor, "_choice", None)

    assert cpu_iteration_dtype() == expected
    assert default_iteration_dtype(CPU) == expected
    assert default_iteration_dtype(torch.device("cuda")) == torch.float16


def test_a_machine_that_says_nothing_iterates_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = processor_flags(tmp_path / "missing")
    monkeypatch.setattr(processor, "processor_flags", lambda: found)
    monkeypatch.setattr(processor, "_choice", None)

    assert cpu_iteration_dtype() == torch.float32


@pytest.mark.parametrize("value", ["bfloat16", "float32"])
def test_what_is_asked_for_overrides_the_flags(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for flags in (frozenset[str](), frozenset({"amx_bf16"})):
        monkeypatch.setattr(processor, "processor_flags", lambda flags=flags: flags)
        monkeypatch.setattr(processor, "_choice", choice_from(value))

        assert str(cpu_iteration_dtype()) == f"torch.{value}"


def test_an_unknown_choice_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="MUON_CORE_CPU_DTYPE='half' is unknown; choose one of auto, bfloat16, float32"
    ):
        choice_from("half")


def test_the_choice_changes_the_iteration_and_bfloat16_stays_near(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(processor, "_choice", dtype)
        found[dtype] = orthogonalize(matrix)
        assert torch.equal(found[dtype], orthogonalize(matrix, iteration_dtype=dtype))

    difference = (found[torch.float32] - found[torch.bfloat16]).norm() / found[torch.float32].norm()
    # About ten roundings of 2^-8 in each of five steps; none would mean that nothing was chosen.
    assert 0 < difference.item() < 8e-2
