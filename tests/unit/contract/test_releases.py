"""DeepSpeed releases: what each may be asked, and that nothing else is."""

from typing import Any

import pytest
from pydantic import ValidationError

from muonscope.contract.releases import DEFAULT_DEEPSPEED, RELEASES, SUPPORTED_DEEPSPEED
from muonscope.contract.run_spec import OptimizerSettings, RunSpec
from muonscope.contract.status import Implementation, StepOrdering


def under(version: str, **fields: Any) -> RunSpec:
    return RunSpec.model_validate({"deepspeed": {"version": version}, **fields})


def refusal(version: str, **fields: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        under(version, **fields)
    return str(refused.value)


def test_releases_are_listed_oldest_first_and_end_with_the_default() -> None:
    numbers = [tuple(map(int, version.split("."))) for version in SUPPORTED_DEEPSPEED]

    assert numbers == sorted(set(numbers))
    assert SUPPORTED_DEEPSPEED[-1] == DEFAULT_DEEPSPEED


def test_each_release_is_named_by_a_hash_of_its_own() -> None:
    hashes = {release.sha256 for release in RELEASES.values()}

    assert len(hashes) == len(RELEASES)
    assert all(len(digest) == 64 and int(digest, 16) for digest in hashes)


@pytest.mark.parametrize("version", SUPPORTED_DEEPSPEED)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_release_runs_in_its_own_ordering_or_not_at_all(version: str, stage: int) -> None:
    native = RELEASES[version].orderings.get(stage)

    for ordering in StepOrdering:
        if ordering is native:
            assert under(version, zero_stage=stage, step_ordering=ordering).step_ordering is native
        else:
            assert version in refusal(version, zero_stage=stage, step_ordering=ordering)


@pytest.mark.parametrize(
    ("version", "stage", "ordering", "ns_method"),
    [
        ("0.17.6", 1, "master", "standard"),
        ("0.18.9", 3, "master", "standard"),
        ("0.19.2", 3, "master", "gram"),
        ("0.19.7", 2, "deferred", "gram"),
        ("0.19.7", 3, "per_tensor", "gram"),
        ("0.19.8", 3, "deferred", "gram"),
    ],
)
def test_what_a_spec_leaves_out_is_as_it_was_released(version: str, stage: int, ordering: str, ns_method: str) -> None:
    spec = under(version, zero_stage=stage, optimizer={"lr": 0.05})

    assert (spec.implementation, spec.step_ordering) == (Implementation.DEEPSPEED, ordering)
    assert (spec.optimizer.ns_method, spec.optimizer.lr) == (ns_method, 0.05)


def test_settings_given_as_an_object_keep_what_they_say() -> None:
    spec = RunSpec.model_validate({"deepspeed": {"version": "0.17.6"}, "optimizer": OptimizerSettings(momentum=0.8)})
    said = RunSpec.model_validate(
        {"deepspeed": {"version": "0.19.2"}, "optimizer": OptimizerSettings(ns_method="standard")}
    )

    assert (spec.optimizer.ns_method, spec.optimizer.momentum) == ("standard", 0.8)
    assert said.optimizer.ns_method == "standard"


def test_a_stored_spec_reads_back_equal_and_the_given_one_is_left_alone() -> None:
    given: dict[str, Any] = {"deepspeed": {"version": "0.17.6"}, "optimizer": {"lr": 0.05}}
    spec = RunSpec.model_validate(given)

    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert given == {"deepspeed": {"version": "0.17.6"}, "optimizer": {"lr": 0.05}}


@pytest.mark.parametrize(
    ("version", "fields", "expected"),
    [
        (
            "0.17.6",
            {"zero_stage": 3},
            "zero_stage=3 is not available under DeepSpeed 0.17.6: its Muon has stages 1 or 2",
        ),
        ("0.19.2", {"step_ordering": "ordered"}, "step_ordering=ordered is not what DeepSpeed 0.19.2 does"),
        ("0.19.8", {"implementation": "muon_core"}, "implementation=muon_core is not what DeepSpeed 0.19.8 runs"),
        ("0.18.9", {"optimizer": {"ns_method": "gram"}}, "optimizer.ns_method=gram is not one of DeepSpeed 0.18.9's"),
        ("0.19.2", {"optimizer": {"ns_method": "polar_express"}}, "optimizer.ns_method=polar_express"),
        ("0.18.2", {"optimizer": {"adam": {"lr": 0.1}}}, "optimizer.adam.lr=0.1 is unknown to DeepSpeed 0.18.2"),
        ("0.16.0", {}, "DeepSpeed 0.16.0 is not on the allow-list"),
    ],
)
def test_what_a_release_does_not_do_is_refused_with_the_reason(
    version: str, fields: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(version, **fields)


def test_without_a_release_masters_emulation_stays_where_it_was() -> None:
    spec = {"implementation": "deepspeed", "step_ordering": "master", "zero_stage": 3}

    with pytest.raises(ValidationError, match="step_ordering=master is not available"):
        RunSpec.model_validate(spec)
    assert RunSpec.model_validate({**spec, "deepspeed": {"version": "0.19.2"}}).step_ordering is StepOrdering.MASTER
