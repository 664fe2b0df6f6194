"""Spec files: what is read, and what each fault of a file becomes."""

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonscope.cli.spec_files import names_a_file, read_experiment, read_spec
from muonscope.contract.run_spec import RunSpec
from muonscope.errors import SpecFileError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def write(folder: Path, text: str | bytes, name: str = "spec.yaml") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    spec = {"name": "first", "loss_scale": {"initial_power": 16}, "tags": ["a", "b"]}
    as_json = write(tmp_path, json.dumps(spec), "spec.json")
    as_yaml = write(tmp_path, "name: first\nloss_scale:\n  initial_power: 16\ntags: [a, b]\n")

    assert read_spec(as_json) == read_spec(as_yaml) == spec


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "precision: bf16\nloss_scale: {initial_power: 8}",
            ["note: loss_scale has no effect: precision bf16 has none"],
        ),
        ("precision: bf16", []),
        ("loss_scale: {initial_power: 8}", []),
        ("loss_scale: {static: 8}", []),
        (
            "loss_scale: {static: 8, window: 5, initial_power: 3}",
            [f"note: loss_scale.{name} has no effect beside loss_scale.static" for name in ("window", "initial_power")],
        ),
        # Of what is no spec the service speaks.
        ("precision: [bf16]\nloss_scale: {initial_power: 8}", []),
        ("precision: fp32\nloss_scale: 8", []),
    ],
)
def test_what_a_spec_says_without_effect_is_told(text: str, told: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    read_spec(write(tmp_path, text), said.append)
    assert said == told


@given(st.dictionaries(st.text(max_size=8).filter(lambda key: key != "$schema"), json_values, max_size=4))
def test_every_json_object_is_read_back_from_a_json_file(value: dict[str, object]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert read_spec(write(Path(folder), json.dumps(value), "spec.json")) == value


def test_the_schema_key_is_for_editors_alone(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, '{"$schema": "x", "steps": 3}', "spec.json")) == {"steps": 3}


def test_a_name_that_looks_like_a_date_stays_a_name(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, "name: 2026-01-02\n")) == {"name": "2026-01-02"}


def test_yaml_numbers_without_a_point_still_make_a_spec(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, "optimizer: {lr: 1e-3}\n"))

    assert RunSpec.model_validate(spec).optimizer.lr == 0.001


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = "base: &base {lr: 0.1, momentum: 0.9}\noptimizer:\n  <<: *base\n  momentum: 0.5\n"

    assert read_spec(write(tmp_path, text))["optimizer"] == {"lr": 0.1, "momentum": 0.5}


@pytest.mark.parametrize("name", ["spec.yaml", "spec.json"])
def test_a_key_given_twice_is_refused_where_the_last_would_silently_win(name: str, tmp_path: Path) -> None:
    text = '{"steps": 3, "steps": 4}' if name.endswith("json") else "steps: 3\nsteps: 4\n"

    with pytest.raises(SpecFileError, match="gives 'steps' twice"):
        read_spec(write(tmp_path, text, name))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "holds a list, not a mapping"),
        ("name: [unclosed\n", r"is not YAML: .*line 2"),
        ("name: !!python/object/apply:os.system ['true']\n", "is not YAML: could not determine a constructor"),
        (b"name: \xff\n", "is not UTF-8 text"),
        ("[" * 3_000, "nested too deeply|is not YAML"),
    ],
)
def test_each_fault_of_a_file_is_named(text: str | bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SpecFileError, match=reason) as caught:
        read_spec(write(tmp_path, text))

    assert caught.value.path.endswith("spec.yaml")
    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecFileError, match=r"none\.yaml: cannot be read: No such file"):
        read_spec(str(tmp_path / "none.yaml"))


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(SpecFileError, match="Is a directory"):
        read_spec(str(tmp_path))


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    with pytest.raises(SpecFileError, match="larger than"):
        read_spec(write(tmp_path, b"#" * (5 * 1024 * 1024)))


def test_a_deepspeed_file_that_deepspeed_would_refuse_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}')

    with pytest.raises(SpecFileError, match=r"ds\.json.*both fp16 and bf16"):
        read_spec(write(tmp_path, b"ds_config: ds.json\n"))


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"steps: 3\n")))

    assert read_spec("-") == {"steps": 3}


OWN = "name: mine\nbase: {steps: 4}\nmatrix: {step_ordering: [master, ordered]}\n"


def test_an_experiment_of_ones_own_is_a_name_a_base_and_a_matrix(tmp_path: Path) -> None:
    own = {"name": "mine", "base": {"steps": 4}, "matrix": {"step_ordering": ["master", "ordered"]}}

    assert read_experiment(write(tmp_path, OWN)) == own
    assert read_experiment(write(tmp_path, json.dumps({"$schema": "x", **own}), "own.json")) == own


def test_an_experiments_base_takes_deepspeeds_own_file_as_a_spec_does(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}), "ds.json")
    told: list[str] = []

    own = read_experiment(write(tmp_path, OWN.replace("{steps: 4}", "{steps: 4, ds_config: ds.json}")), told.append)

    assert (own["base"]["zero_stage"], own["base"]["micro_batch_size"], own["base"]["steps"]) == (2, 4, 4)
    assert told


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OWN.replace("base:", "bsae:"), "holds 'bsae', which an experiment does not have"),
        ("name: mine\nsteps: 4\n", "holds 'steps', which an experiment does not have"),
        ("name: mine\nbase: {steps: 4}\n", "has no matrix"),
        (OWN.replace("name: mine\n", ""), "has no name"),
        (OWN.replace("{steps: 4}", "[steps]"), "has a base that is not a mapping"),
        (OWN.replace("[master, ordered]", "master"), "has a matrix that does not list values by field"),
        ("name: mine\nmatrix: [step_ordering]\n", "has a matrix that does not list values by field"),
    ],
)
def test_each_fault_of_an_experiments_file_is_named(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SpecFileError, match=reason) as refused:
        read_experiment(write(tmp_path, text))

    assert refused.value.remedy


@pytest.mark.parametrize(
    ("word", "is_file"),
    [
        ("thirty-step", False),
        ("byte-gpt", False),
        ("mine.yaml", True),
        ("mine.json", True),
        ("./mine", True),
        ("-", True),
    ],
)
def test_a_name_that_the_service_knows_is_no_file(word: str, is_file: bool) -> None:
    assert names_a_file(word) is is_file
