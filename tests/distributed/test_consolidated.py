"""Consolidated checkpoints: written by one world size and stage, resumed by another, to the last bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.distributed import checkpoint_cases as cases
from tests.distributed.gang import Gang
from tests.distributed.offload_cases import OFFLOAD
from tests.distributed.readings import FP32_TOLERANCE, on_one_device, relative

Gangs = Callable[[int], Gang]


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ((2, 2), (1, 1)),
        ((1, 1), (2, 3)),
        ((2, 1), (2, 3)),
        ((2, 3), (2, 2)),
        ((2, 3), (3, 3)),
    ],
    ids=str,
)
def test_another_world_size_and_stage_resume_the_same_bits(
    gang: Gangs, tmp_path: Path, saved_by: tuple[int, int], resumed_by: tuple[int, int]
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = gang(saved_by[0]).run(cases.save, stage=saved_by[1], folder=folder)[0]
    # A global batch of eight over three ranks: the last takes two samples; its mean weighs more, so none is trained.
    more = 0 if resumed_by[0] == 3 else 3
    resumed = gang(resumed_by[0]).run(cases.resume, stage=resumed_by[1], folder=folder, more=more)

    for run in resumed:
        assert run["at_checkpoint"] == saved["at_checkpoint"]
        assert run["untouched"]["weights"] != saved["at_checkpoint"]["weights"]
        assert run["client_state"] == {"step": 4}
    if more:
        # Sums over other numbers of ranks, in float32.
        assert relative(saved["weights"], resumed[0]["weights"]) < FP32_TOLERANCE
        assert resumed[0]["end"]["weights"] != resumed[0]["at_checkpoint"]["weights"]
        assert resumed[0]["end"]["adam_steps"] == saved["end"]["adam_steps"] == [7.0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_set_up_goes_on_to_the_last_bit_after_a_discarded_step(
    gang: Gangs, tmp_path: Path, stage: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = gang(2).run(cases.save, stage=stage, folder=folder, precision="fp16")[0]
    resumed = gang(2).run(cases.resume, stage=stage, folder=folder, precision="fp16")[0]

    assert resumed["at_checkpoint"] == saved["at_checkpoint"]
    assert resumed["end"] == saved["end"]
    assert saved["at_checkpoint"]["counts"] == (4, 1)
    assert saved["at_checkpoint"]["scaler"]["cur_hysteresis"] == 1
    assert resumed["untouched"]["scaler"]["cur_hysteresis"] == 2
    assert resumed["dtypes"] == ["torch.float16"]


@on_one_device
def test_offloaded_state_resumes_where_it_is_not_offloaded(gang: Gangs, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = gang(2).run(cases.save, stage=2, folder=folder, zero=OFFLOAD)[0]
    resumed = gang(2).run(cases.resume, stage=3, folder=folder)[0]

    assert resumed["at_checkpoint"] == saved["at_checkpoint"]
    assert resumed["end"] == saved["end"]


def test_the_files_name_every_tensor_and_stay_within_their_size(gang: Gangs, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    gang(2).run(cases.save, stage=3, folder=str(folder), file_bytes=4000, more=0)
    manifest = json.loads((folder / "manifest.json").read_text())
    held: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            held |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118

    assert set(manifest["tensors"]) == set(held)
    assert len(set(manifest["tensors"].values())) > 1
    assert held["master/stack.layers.0.weight"] == held["momentum_buffer/stack.layers.0.weight"] == [40, 24]
    assert held["exp_avg_sq/stack.layers.0.bias"] == held["exp_avg/stack.layers.0.bias"] == [40]
    assert {"frozen/shift", "buffer/seen"} < set(held)
    assert manifest["parameters"]["stack.layers.1.weight"] == {"shape": [17, 40], "route": "muon"}
    assert not folder.with_name("checkpoint.partial").exists()


def test_all_that_it_holds_is_on_the_disk_before_it_has_its_name(gang: Gangs, tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "checkpoint"

    (told,) = gang(1).run(cases.order_of_keeping, folder=str(folder))

    named = told.index("renamed to checkpoint")
    held = sorted(path.name for path in folder.iterdir())
    assert len(held) > 2
    assert sorted(told[:named]) == sorted([*held, "checkpoint.partial"])
    assert told[named - 1] == "checkpoint.partial"
    assert told[named + 1 :] == ["kept"]


def test_a_checkpoint_of_another_routing_is_refused_and_changes_nothing(gang: Gangs, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    gang(2).run(cases.save, stage=1, folder=folder, more=0)

    for message, is_untouched in gang(2).run(
        cases.refused_resume, stage=2, folder=folder, pattern="stack.layers.1.weight"
    ):
        assert "stack.layers.1.weight is muon of shape [17, 40] there and adamw of shape [17, 40] here" in message
        assert is_untouched


@pytest.mark.parametrize("damage", ["manifest", "version", "tensors"])
def test_a_damaged_checkpoint_is_refused_with_what_is_wrong(gang: Gangs, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "checkpoint"
    gang(1).run(cases.save, stage=1, folder=str(folder), more=0, steps=1)
    manifest = folder / "manifest.json"
    if damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "version":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    else:
        (folder / "tensors-00001.safetensors").write_bytes(b"short")
    expected: dict[str, Any] = {
        "manifest": "manifest.json cannot be read",
        "version": "99",
        "tensors": "cannot be read",
    }

    ((message, is_untouched),) = gang(1).run(cases.refused_resume, stage=1, folder=str(folder), pattern="*bias")

    assert "cannot resume from" in message
    assert expected[damage] in message
    assert is_untouched


def test_nothing_is_overwritten_and_no_gradient_is_lost(gang: Gangs, tmp_path: Path) -> None:
    for messages in gang(2).run(cases.refused_save, folder=str(tmp_path)):
        assert len(messages) == 3
        assert "exists already" in messages[0]
        assert "inside a gradient accumulation window there is a gradient to lose" in messages[1]
        assert "inside a gradient accumulation window there is a gradient that the next step would take" in messages[2]


@pytest.mark.parametrize("has_name", [True, False])
def test_what_the_first_rank_alone_cannot_save_is_refused_by_every_rank(
    gang: Gangs, tmp_path: Path, has_name: bool
) -> None:
    folder = str(tmp_path / "checkpoint") if has_name else None
    expected = "is not JSON" if has_name else "empty name"

    for message in gang(2).run(cases.refused_by_the_first_rank, folder=folder):
        assert expected in message
    assert not any(tmp_path.iterdir())


def test_a_schedule_whose_milestones_are_numbers_goes_on_as_if_nothing_had_happened(
    gang: Gangs, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")

    (whole,) = gang(1).run(cases.learning_rates, folder=folder, is_resumed=False)
    (rest,) = gang(1).run(cases.learning_rates, folder=folder, is_resumed=True)

    assert whole == pytest.approx([0.05, 0.05, 0.1, 0.01, 0.001])
    assert rest == whole[2:]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((5,), "tensor buffer/seen is of shape [3] there and of shape [5] here"), (None, "tensor buffer/more is absent")],
)
def test_another_buffer_is_refused_by_name_and_nothing_is_changed(
    gang: Gangs, tmp_path: Path, shape: tuple[int, ...] | None, reason: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    gang(2).run(cases.save, stage=2, folder=folder, more=0, steps=1)

    for message, is_untouched in gang(2).run(cases.refused_another_buffer, stage=2, folder=folder, shape=shape):
        assert reason in message
        assert is_untouched


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        ({"tensors": None}, "manifest.json says tensors=None"),
        ({"loss_scaler": {"cur_scale": "x"}}, "manifest.json says loss_scaler.cur_scale='x'"),
        ({"progress": {"global_steps": 1}}, "manifest.json says progress.global_samples=None"),
        ({"adam_steps": {}}, "manifest.json says no adam_steps.stack.layers.0.bias"),
        ({"schedule": {}}, "manifest.json says no schedule.last_batch_iteration"),
        ("shape", "tensor master/stack.layers.1.bias is of shape [50] there and of shape [17] here"),
        ("absence", "tensor momentum_buffer/stack.layers.1.weight is absent there"),
    ],
    ids=str,
)
def test_what_has_been_altered_is_refused_by_name_and_nothing_is_changed(
    gang: Gangs, tmp_path: Path, alter: dict[str, Any] | str, reason: str
) -> None:
    folder = tmp_path / "checkpoint"
    gang(1).run(cases.save, stage=1, folder=str(folder), more=0, steps=1)
    manifest, tensors = folder / "manifest.json", folder / "tensors-00001.safetensors"
    if isinstance(alter, dict):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **alter}))
    else:
        held = load_file(tensors)
        if alter == "shape":
            held["master/stack.layers.1.bias"] = torch.zeros(50)
        else:
            del held["momentum_buffer/stack.layers.1.weight"]
        save_file(held, tensors)

    ((message, is_untouched),) = gang(1).run(cases.refused_as_it_is, stage=1, folder=str(folder))

    assert reason in message
    assert is_untouched


def test_what_one_rank_cannot_read_no_rank_loads(gang: Gangs, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    gang(2).run(cases.save, stage=2, folder=folder, more=0, steps=1)

    (first, first_untouched), (second, second_untouched) = gang(2).run(
        cases.refused_on_one_rank, stage=2, folder=folder
    )

    assert "rank 1: manifest.json cannot be read" in first
    assert "-elsewhere: manifest.json cannot be read" in second
    assert first_untouched
    assert second_untouched


@pytest.mark.parametrize("stage", [2, 3])
def test_names_stay_right_when_parameters_are_frozen_and_unfrozen_later(
    gang: Gangs, tmp_path: Path, stage: int
) -> None:
    for found in gang(2).run(cases.thawed, stage=stage, folder=str(tmp_path / "checkpoint")):
        assert len(found) == 6
        assert all(found.values()), found
