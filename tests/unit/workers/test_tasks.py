"""The built-in tasks: their inputs are what was published, and the same on every call."""

import base64
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from muon_core.zero.orderings import STEP_ORDERINGS
from muonscope.contract.attempts import MAX_KEPT_WEIGHTS
from muonscope.contract.run_spec import ByteGptTask, CalmBoomTask, MatrixPairTask, RunSpec, SimpleModelTask, UserTask
from muonscope.contract.status import StepOrdering
from workers import engine
from workers.errors import TaskUnusable
from workers.final_state import InitialWeights
from workers.tasks import TaskContext, build_task, calm_boom, matrix_pair, tokens_in
from workers.tasks.byte_gpt import ByteGpt, read_text
from workers.tasks.calm_boom import cuda_randn, philox4x32
from workers.tasks.simple_model import batch_seed

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "deepspeed.json").read_text())


def context(rank: int = 0, seed: int = 0, micro_batch_size: int = 4, dtype: torch.dtype = torch.float16) -> TaskContext:
    return TaskContext(seed, rank, 2, micro_batch_size, dtype)


def test_philox_gives_the_published_test_vectors() -> None:
    # Random123's known answers for philox4x32-10.
    zeros = philox4x32(np.zeros((1, 4), dtype=np.uint64), (0, 0))
    ones = philox4x32(np.full((1, 4), 0xFFFFFFFF, dtype=np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))

    assert zeros.tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert ones.tolist() == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]


@pytest.mark.parametrize(("name", "call"), [("calm", 0), ("boom", 1)])
def test_cudas_random_numbers_are_computed_on_any_machine(name: str, call: int) -> None:
    inputs = cuda_randn(32, seed=0, call=call).half().tolist()

    assert inputs == GOLDEN["calm_boom_inputs"][name]


def test_more_numbers_than_one_cuda_block_gives_are_refused() -> None:
    with pytest.raises(ValueError, match="255 elements"):
        cuda_randn(256, seed=0, call=0)


def test_boom_overflows_on_its_step_only() -> None:
    run = calm_boom.build(CalmBoomTask(overflow_step=1), context())

    assert [float(run.batch(step, 0)[1].max()) > 1e4 for step in range(4)] == [False, True, False, False]
    assert torch.equal(run.batch(0, 0)[0], run.batch(1, 0)[0])


def test_a_fixed_batch_is_the_same_each_step_and_another_on_each_rank() -> None:
    one, other = (build_task(RunSpec(), context(rank)) for rank in (0, 1))

    assert all(torch.equal(a, b) for a, b in zip(one.batch(0, 0), one.batch(9, 0), strict=True))
    assert not torch.equal(one.batch(0, 0)[0], other.batch(0, 0)[0])
    assert not torch.equal(one.batch(0, 0)[0], one.batch(0, 1)[0])


def test_a_fresh_batch_differs_each_step_and_is_repeatable() -> None:
    spec = RunSpec(task=SimpleModelTask(fixed_batch=False))
    run, again = build_task(spec, context()), build_task(spec, context())

    assert not torch.equal(run.batch(0, 0)[0], run.batch(1, 0)[0])
    assert torch.equal(run.batch(5, 0)[0], again.batch(5, 0)[0])


def test_seeds_of_neighbours_are_all_different() -> None:
    seeds = {
        batch_seed(context(rank, seed), position) for seed in range(8) for rank in range(8) for position in range(64)
    }

    assert len(seeds) == 8 * 8 * 64


def test_byte_gpt_reads_the_standard_library_by_default_and_repeats_itself() -> None:
    spec = RunSpec(task=ByteGptTask())
    run, again = build_task(spec, context()), build_task(spec, context())
    inputs, targets = run.batch(3, 0)

    assert inputs.shape == targets.shape == (4, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, again.batch(3, 0)[0])
    assert tokens_in(run, (inputs, targets)) == 256
    # Real text: mostly printable.
    assert ((inputs >= 32) & (inputs < 127)).float().mean() > 0.8


def test_byte_gpt_starts_as_uncertain_as_a_uniform_guess() -> None:
    torch.manual_seed(0)
    run = build_task(RunSpec(task=ByteGptTask()), context())

    loss = run.loss(run.model, run.batch(0, 0))

    assert loss.item() == pytest.approx(np.log(256), abs=0.15)


def test_byte_gpt_cannot_look_ahead() -> None:
    torch.manual_seed(0)
    model = ByteGpt(ByteGptTask())
    tokens = torch.randint(0, 256, (1, 64))
    changed = tokens.clone()
    changed[0, 40:] = 7

    assert torch.equal(model(tokens)[0, :40], model(changed)[0, :40])
    assert not torch.equal(model(tokens)[0, 40:], model(changed)[0, 40:])


def test_a_users_file_and_folder_are_read_whole_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / ".hidden").write_bytes(b"no")

    assert bytes(read_text(str(tmp_path))) == b"onetwo"
    assert bytes(read_text(str(tmp_path / "a.txt"))) == b"one"


def test_a_text_that_is_missing_or_too_short_is_refused_by_name(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 65)

    with pytest.raises(TaskUnusable, match=r"nowhere.*every node of the run reads"):
        read_text(str(tmp_path / "nowhere"))
    with pytest.raises(TaskUnusable, match=r"~nobody-of-this-name.* cannot be read"):
        read_text("~nobody-of-this-name/text")
    with pytest.raises(TaskUnusable, match="65 bytes"):
        build_task(RunSpec(task=ByteGptTask(text=str(short))), context())


@pytest.mark.parametrize("name", ["no_such_module_at_all:task", "os:no_such_function"])
def test_a_users_task_that_cannot_be_imported_is_refused_by_name(name: str) -> None:
    with pytest.raises(TaskUnusable, match=f"{name}.*cannot be imported.*--working-dir"):
        build_task(RunSpec(task=UserTask(name=name)), context())


def test_a_users_task_that_needs_what_is_not_installed_is_told_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_task_that_needs_more.py").write_text("import no_such_module_at_all.part\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(TaskUnusable, match="install no_such_module_at_all on every node") as refused:
        build_task(RunSpec(task=UserTask(name="a_task_that_needs_more:task")), context())

    assert "--working-dir" not in str(refused.value)


def test_a_users_task_that_returns_something_else_is_refused_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_a_task_at_all.py").write_text("def task(context):\n    return context.options\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(TaskUnusable, match="returned dict, which lacks model, batch, loss"):
        build_task(RunSpec(task=UserTask(name="not_a_task_at_all:task")), context())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def task(context)\n", "SyntaxError: expected ':'"),
        ("import sys\nsys.exit('no arguments')\n", "SystemExit: no arguments"),
        ("def task(context):\n    raise ValueError('no such split')\n", "ValueError: no such split"),
        ("import sys\ndef task(context):\n    sys.exit(2)\n", "SystemExit: 2"),
    ],
)
def test_what_a_users_task_raises_as_it_is_built_is_its_own_error(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"raises_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(TaskUnusable, match=f"task '{name}:task' .*{said}"):
        build_task(RunSpec(task=UserTask(name=f"{name}:task")), context())


def test_memory_that_runs_out_as_a_task_is_built_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "too_large_a_task.py").write_text("def task(context):\n    return bytearray(2**62)\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(MemoryError):
        build_task(RunSpec(task=UserTask(name="too_large_a_task:task")), context())


def test_what_a_tasks_batch_raises_before_the_first_step_is_its_own_error() -> None:
    class Broken:
        def batch(self, step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
            raise FileNotFoundError("shard-0.bin")

    with pytest.raises(TaskUnusable, match=r"batch\(\) raised FileNotFoundError: shard-0"):
        engine._hash_data(RunSpec(), Broken())  # type: ignore[arg-type]


def test_contract_and_muon_core_spell_the_same_orderings() -> None:
    assert {str(ordering) for ordering in StepOrdering} == set(STEP_ORDERINGS)


def test_a_steps_samples_do_not_depend_on_how_it_is_cut() -> None:
    one = matrix_pair.build(MatrixPairTask(width=6), context(micro_batch_size=8))
    four = matrix_pair.build(
        MatrixPairTask(width=6), replace(context(micro_batch_size=2), gradient_accumulation_steps=4)
    )

    for step in (0, 1, 5, 3):  # forwards, ahead and back
        whole = one.batch(step, 0)
        parts = [four.batch(step, micro_batch) for micro_batch in range(4)]
        assert all(
            torch.equal(torch.cat(cut), tensor) for cut, tensor in zip(zip(*parts, strict=True), whole, strict=True)
        )
    assert not torch.equal(one.batch(0, 0)[0], one.batch(1, 0)[0])


def test_the_matrix_pair_draws_the_published_numbers() -> None:
    run = matrix_pair.build(MatrixPairTask(), context(rank=1, micro_batch_size=8, dtype=torch.float32))
    generator = torch.Generator().manual_seed(2)
    for step in range(3):
        published = [torch.randn(8, 64, generator=generator) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(run.batch(step, 0), published, strict=True))


def test_weights_are_kept_of_small_models_alone() -> None:
    parameters = [torch.nn.Parameter(torch.tensor(values).half()) for values in ([[1.0, -0.0]], [[0.5], [math.nan]])]
    small = InitialWeights(parameters, parameters, 0, 1).compare([0], None)
    large = [torch.nn.Parameter(torch.zeros(MAX_KEPT_WEIGHTS + 1))]

    assert small.weights is not None
    kept = np.frombuffer(base64.b64decode(small.weights), "<f4")
    np.testing.assert_array_equal(kept, np.array([1.0, -0.0, 0.5, math.nan], "<f4"))
    assert np.signbit(kept).tolist()[:2] == [False, True]
    assert InitialWeights(large, large, 0, 1).compare([0], None).weights is None
