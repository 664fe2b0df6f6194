"""What of the kernels needs no GPU: who they take, which matrices go together, tile sizes on disk, and the way back."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muon_core import Muon
from muon_core.kernels import device_has_kernels, kernel_mode, kernels, shape_has_kernels, tuning
from muon_core.kernels.availability import mode_from
from muon_core.kernels.batches import Batch, addresses, block_tables, iteration_form, plan_batches
from muon_core.kernels.launch import launch
from muon_core.kernels.tuning import ProductConfig, read_configs, shipped_config, write_configs
from muon_core.muon import nonfinite_flag, orthogonalize_directions_
from muon_core.newton_schulz import takes_kernels
from muon_core.parameters import MatrixShape


class Compiling:
    """A kernel as triton has them: a call compiles for the types it is given, and what comes back takes no others."""

    def __init__(self) -> None:
        self.compiled_for: list[type] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(tensor: torch.Tensor, number: float, **_: int) -> dict[tuple[int, ...], Any]:
            self.compiled_for.append(type(number))

            def run(tensor: torch.Tensor, other: float) -> None:
                assert type(other) is type(number), f"compiled for {number}, run with {other}"

            return {(1, 1, 1): run}

        return compile_and_run


def test_a_kernel_compiled_for_a_whole_number_runs_with_no_other_kind() -> None:
    kernel, tensor = Compiling(), torch.zeros(4)

    # A learning rate of 0, as a script writes it, and what a schedule makes of it; a size of any magnitude.
    for number in (0, 0.5, 0.25, 7, 2**40):
        launch(kernel, 1, (tensor, number), (), num_warps=4)

    assert kernel.compiled_for == [int, float, int]


SHAPES = st.builds(
    MatrixShape, st.integers(1, 4), st.integers(1, 8).map(lambda n: 8 * n), st.integers(1, 8).map(lambda n: 8 * n)
)


@given(st.lists(SHAPES, min_size=1, max_size=12), st.sampled_from(["gram", "standard"]), st.integers(64, 20_000))
def test_every_matrix_is_in_exactly_one_batch_and_no_batch_is_too_large(
    shapes: list[MatrixShape], ns_method: str, max_elements: int
) -> None:
    batches = plan_batches(tuple(shapes), ns_method, max_elements)

    found = sorted((p, at) for batch in batches for p, at in zip(batch.pieces, batch.inner_offsets, strict=True))
    assert found == [(p, i * s.rows * s.cols) for p, s in enumerate(shapes) for i in range(s.batch)]
    for batch in batches:
        assert batch.numel <= max_elements or batch.num_entries == 1
        assert {min(s.rows, s.cols) for s in batch.segments} == {batch.small_dimension}
        assert batch.segments[0].first == 0
        assert sum(s.count for s in batch.segments) == batch.num_entries
        for segment in batch.segments:
            for entry in range(segment.first, segment.first + segment.count):
                shape = shapes[batch.pieces[entry]]
                assert (shape.rows, shape.cols) == (segment.rows, segment.cols)
                assert batch.form == iteration_form(shape.rows, shape.cols, ns_method)


def test_matrices_that_share_their_small_dimension_share_a_batch() -> None:
    shapes = (MatrixShape(1, 768, 768), MatrixShape(1, 3072, 768), MatrixShape(1, 768, 3072), MatrixShape(1, 64, 256))

    batches = plan_batches(shapes, "gram", 1 << 26)

    # The square one iterates in the other form.
    assert sorted((batch.form, batch.pieces) for batch in batches) == [
        ("gram", (2, 1)),
        ("gram", (3,)),
        ("standard", (0,)),
    ]


@given(st.lists(st.integers(0, 70), min_size=1, max_size=8))
def test_a_passs_blocks_cover_every_element_once(sizes: list[int]) -> None:
    tables = block_tables(tuple(sizes), (1.0,) * len(sizes), 16, torch.device("cpu"))

    seen = []
    for program in range(tables.num_blocks):
        entry = int(tables.entry_of_block[program])
        begin = (program - int(tables.first_block[entry])) * 16
        seen += [(entry, element) for element in range(begin, min(begin + 16, sizes[entry]))]
    assert seen == [(entry, element) for entry, size in enumerate(sizes) for element in range(size)]
    assert int(tables.first_block[len(sizes)]) == tables.num_blocks


def test_addresses_are_element_offsets_from_the_first_tensor_and_are_made_once() -> None:
    whole = torch.zeros(96)
    pieces = [whole[32:64], whole[0:32], whole[68:96]]
    batch = Batch("standard", (), (0, 1, 1, 2), (0, 0, 16, 0))

    where = addresses(pieces, batch)

    assert where.offsets.tolist() == [0, -32, -16, 36]
    # 36 elements are no multiple of 16: 16-byte loads would be misaligned.
    assert not where.is_aligned
    assert addresses(pieces, batch) is where


def test_the_mode_decides_which_shapes_are_taken() -> None:
    assert kernel_mode() == "auto"
    assert [shape_has_kernels(*shape) for shape in [(256, 256), (255, 512), (4096, 128), (512, 1001)]] == [
        True,
        False,
        False,
        False,
    ]
    with kernels("all"):
        assert shape_has_kernels(64, 128)
        assert not shape_has_kernels(64, 129)
    with kernels("off"):
        assert not shape_has_kernels(4096, 4096)
    assert kernel_mode() == "auto"


def test_an_unknown_mode_is_named_with_its_choices() -> None:
    with pytest.raises(ValueError, match="MUON_CORE_KERNELS='fast' is unknown; choose one of auto, all, off"):
        mode_from("fast")


def test_the_cpu_has_no_kernels_and_steps_without_them() -> None:
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    assert not device_has_kernels(matrix.device)
    assert not takes_kernels(matrix, torch.float16)

    directions = {}
    for mode in ("all", "off"):
        with kernels(mode):  # type: ignore[arg-type]
            directions[mode] = matrix.clone()
            orthogonalize_directions_([directions[mode]], [MatrixShape(1, 256, 512)], ns_method="gram", ns_steps=2)

    assert torch.equal(directions["all"], directions["off"])
    assert not torch.equal(directions["all"], matrix)


def test_tuned_tile_sizes_survive_on_disk_and_others_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "muon_core" / "products.json"
    first, second = ProductConfig(64, 2, 64, 4, 4), ProductConfig(128, 1, 32, 4, 6)

    write_configs(path, {"768x768": first})
    write_configs(path, {"768x3072t": second})

    assert read_configs(path) == {"768x768": first, "768x3072t": second}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"768x768": {"tile": 128, "colour": 3}})])
def test_a_file_that_cannot_be_used_is_said_and_the_shipped_sizes_hold(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)

    with caplog.at_level(logging.WARNING):
        assert read_configs(path) == {}

    assert "delete it or tune again" in caplog.text


def test_every_shipped_tile_size_is_one_that_tuning_tries() -> None:
    shapes = [(768, 768), (768, 3072), (1600, 6400), (4096, 4096), (4096, 11008), (256, 99999)]

    shipped = {shipped_config(n, k, transposed) for n, k in shapes for transposed in (False, True)}

    assert shipped <= set(tuning.CANDIDATES)
    assert len(shipped) > 1


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert tuning.cache_file("NVIDIA H200") == tmp_path / "muon_core" / "products-NVIDIA-H200.json"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_with_a_nonfinite_gradient_is_discarded_when_asked(bad: float) -> None:
    matrix, vector = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "route": "adamw"}], lr=0.1, skip_nonfinite=True)

    def step(last: float) -> list[torch.Tensor]:
        matrix.grad, vector.grad = torch.ones(4, 6), torch.ones(5)
        # In the vector: what AdamW takes discards Muon's matrices too.
        vector.grad[-1] = last
        optimizer.step()
        return [t.detach().clone() for p in (matrix, vector) for t in (p, *optimizer.state[p].values())]

    first, discarded, applied = step(1.0), step(bad), step(1.0)

    assert all(map(torch.equal, discarded, first))
    # The counter-test: an optimizer that never steps would pass the line above.
    assert not any(map(torch.equal, applied, first))


def test_a_learning_rate_may_be_a_tensor() -> None:
    parameters = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    for parameter, lr in zip(parameters, (0.1, torch.tensor(0.1)), strict=True):
        parameter.grad = torch.arange(24.0).view(4, 6)
        Muon([parameter], lr=lr, weight_decay=0.5).step()

    torch.testing.assert_close(*parameters)


def test_the_flag_counts_every_gradient_and_there_may_be_none() -> None:
    good, bad = torch.ones(3, dtype=torch.float16), torch.tensor([1.0, float("nan")])

    assert nonfinite_flag([]) is None
    assert nonfinite_flag([good, good]).item() == 0.0  # type: ignore[union-attr]
    assert nonfinite_flag([good, bad, good]).item() == 1.0  # type: ignore[union-attr]
