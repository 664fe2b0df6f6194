"""`muonscope compare`: the answer in words that fit what differs, and figures under one form of names."""

import json
from typing import Any

import pytest

from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import FakeService

COMPARISON: dict[str, Any] = {
    "a": "r1",
    "b": "r2",
    "names": {"a": "tiny master", "b": "tiny ordered"},
    "spec_difference": [{"field": "step_ordering", "a": "master", "b": "ordered"}],
    "is_pair": True,
    "bit_equal_until": 1,
    "first_divergence": {"step": 1, "scalar": "momentum_norm", "a": "NaN", "b": 55.1596, "parameter": "boom.weight"},
    "explanation": "they part at the first overflow",
    "discarded": {"a": 17, "b": 2, "both": 2, "a_runs": [[0, 16]], "overflows": {"a": 17, "b": 2}},
    "loss_scale": {"a": {"initial": 65536.0, "changes": [[1, 2.0]]}, "b": {"initial": 65536.0, "changes": []}},
    "final": {"loss": {"a": "Infinity", "b": None, "difference": None}},
    "cost": {"step_time_s": {"a": 0.02, "b": 0.025, "ratio": 1.25}},
}


def test_compare_answers_first_and_then_shows_both_sides(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/compare"] = COMPARISON

    out = command("compare", "r1", "r2").out

    assert out.splitlines()[:3] == [
        "they part at the first overflow",
        "bit-equal until step 1",
        "first divergence: step 1, momentum norm: nan | 55.16; the momentum differs most in boom.weight",
    ]
    rows = [line.split("  ") for line in out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["spec", "tiny master (r1)", "tiny ordered (r2)"] in cells
    assert ["record", "tiny master (r1)", "tiny ordered (r2)"] in cells
    assert ["step_ordering", "master", "ordered"] in cells
    assert ["discarded steps", "17", "2"] in cells
    assert ["overflows", "17", "2"] in cells
    assert ["first loss scale", "65536", "65536"] in cells
    assert ["last loss", "inf", "–"] in cells
    assert ["median step time in s", "0.02", "0.025"] in cells
    assert dict(service.requests[0].url.params) == {"a": "r1", "b": "r2"}


@pytest.mark.parametrize(
    ("differing", "num_differing", "lines"),
    [
        ([("embed", "muon", "adamw")], 1, ["embed is Muon's in A and AdamW's in B"]),
        (
            [("a", "adamw", "muon"), ("b", "frozen", "muon"), ("c", "frozen", "muon")],
            3,
            ["a is AdamW's in A and Muon's in B", "b and c are frozen in A and Muon's in B"],
        ),
        ([(name, "muon", "adamw") for name in "abcd"], 4, ["a, b, c and d are Muon's in A and AdamW's in B"]),
        ([(name, "muon", "adamw") for name in "abcde"], 5, ["a, b, c and 2 more are Muon's in A and AdamW's in B"]),
        (
            [("a", "muon", "a later one")],
            7,
            [
                "a is Muon's in A and another optimizer's in B",
                "7 parameters are not the same optimizer's in both",
            ],
        ),
    ],
)
def test_parameters_that_not_the_same_optimizer_takes_are_named(
    differing: list[tuple[str, str, str]],
    num_differing: int,
    lines: list[str],
    command: RunCommand,
    service: FakeService,
) -> None:
    listed = [{"parameter": name, "a": a, "b": b} for name, a, b in differing]
    service.answers["GET", "/compare"] = COMPARISON | {"routes": {"num_differing": num_differing, "differing": listed}}

    printed = command("compare", "r1", "r2").out.splitlines()

    assert printed[3 : 3 + len(lines)] == lines
    assert printed[3 + len(lines)] == ""


def test_compare_as_json_keeps_non_finite_numbers(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/compare"] = COMPARISON

    assert json.loads(command("compare", "r1", "r2", "--json").out)["first_divergence"]["a"] == "NaN"


def divergence(**found: Any) -> dict[str, Any]:
    return COMPARISON | {"bit_equal_until": found["step"], "first_divergence": found}


def test_a_parameter_is_named_for_its_momentum_and_never_for_a_loss(command: RunCommand, service: FakeService) -> None:
    service.answers["GET", "/compare"] = divergence(step=0, scalar="loss", a=0.7246, b=0.7245, parameter="3.weight")

    assert command("compare", "r1", "r2").out.splitlines()[1] == (
        "first divergence: step 0, loss: 0.7246 | 0.7245; the momentum differs most in 3.weight"
    )


def test_two_numbers_that_differ_are_written_with_the_digits_that_do(command: RunCommand, service: FakeService) -> None:
    final = {"loss": {"a": 0.060851, "b": 0.060852}, "max_weight_motion": {"a": 0.25, "b": 0.25}}
    found = {"step": 0, "scalar": "momentum_norm", "a": 0.060851, "b": 0.060852, "parameter": None}
    service.answers["GET", "/compare"] = divergence(**found) | {"final": final}

    out = command("compare", "r1", "r2").out

    assert "first divergence: step 0, momentum norm: 0.060851 | 0.060852\n" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["last", "loss", "0.060851", "0.060852"] in rows
    assert ["largest", "weight", "motion", "0.25", "0.25"] in rows


@pytest.mark.parametrize(("until", "is_said"), [(0, False), (1, True)])
def test_records_that_were_never_equal_are_not_said_to_be_equal_until_some_step(
    until: int, is_said: bool, command: RunCommand, service: FakeService
) -> None:
    service.answers["GET", "/compare"] = COMPARISON | {"bit_equal_until": until}

    assert ("bit-equal until step" in command("compare", "r1", "r2").out) is is_said


@pytest.mark.parametrize(("initial", "is_shown"), [(None, False), (256.0, True)])
def test_loss_scales_are_shown_where_a_run_has_one(
    initial: float | None, is_shown: bool, command: RunCommand, service: FakeService
) -> None:
    none = {"initial": None, "final": None, "num_changes": 0, "changes": []}
    service.answers["GET", "/compare"] = COMPARISON | {"loss_scale": {"a": none, "b": none | {"initial": initial}}}

    out = command("compare", "r1", "r2").out

    assert ("changes of the loss scale" in out) is is_shown
    assert "discarded steps" in out


def test_what_is_not_compared_and_how_often_clipping_acted_are_sentences(
    command: RunCommand, service: FakeService
) -> None:
    norm = {"quantity": "grad_norm", "a": "the norm of the update", "b": "the norm of the gradient"}
    clipping = {
        "a": {"limit": 1.0, "scope": "update", "applied": 60, "acted": 60},
        "b": {"limit": 0.5, "scope": "muon_exempt", "applied": 60, "acted": None},
    }
    momentum = norm | {"quantity": "momentum_norm"}
    final = {"final": {"momentum_norm": {"a": 138.3, "b": 0.38}}}
    service.answers["GET", "/compare"] = COMPARISON | final | {"not_compared": [norm, momentum], "clipping": clipping}

    lines = command("compare", "r1", "r2").out.splitlines()

    assert "gradient norm is the norm of the update in A and the norm of the gradient in B: not compared" in lines
    assert "A's update was clipped to 1 in 60 of 60 applied steps" in lines
    assert "B's gradient of what AdamW takes was clipped to 0.5 in an unrecorded number of 60 applied steps" in lines
    assert "last momentum norm (not compared)" in [line.split("  ")[0] for line in lines]


def test_the_lower_loss_is_told_with_why_it_may_mean_nothing(command: RunCommand, service: FakeService) -> None:
    sides = {
        side: {"last": last, "lowest": last, "lowest_step": 59, "mean_of_last": last, "mean_of_last_steps": 6}
        for side, last in (("a", 0.5), ("b", 0.25))
    }
    lower = {"side": "b", "from_step": 12, "until_step": 59}
    service.answers["GET", "/compare"] = COMPARISON | {
        "learning": sides | {"lower": lower, "caveat": "The data differ."}
    }

    out = command("compare", "r1", "r2").out
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]

    assert "B's loss is lower from step 12 on, to step 59. The data differ." in out.splitlines()
    assert ["lowest loss of applied steps", "0.5 at step 59", "0.25 at step 59"] in cells
    assert ["mean loss of the last 10 % applied", "0.5 over 6 steps", "0.25 over 6 steps"] in cells
