"""Figures: what each built-in experiment holds a run against, and that every deviation from it is seen."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from muonscope.contract.published import calm_boom_norms
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import RunStatus, Verdict
from service.analysis import builtin_experiments
from service.analysis.experiment_table import build_table
from service.analysis.figures import Figure, Readings, RunResult, figure


def results(name: str) -> list[RunResult]:
    """The runs of a built-in experiment, ended, of which nothing else has been read."""
    return [
        RunResult(
            run_id=str(place), spec=RunSpec.model_validate(cell.spec).model_dump(mode="json"),
            status=RunStatus.SUCCEEDED, verdict=Verdict.TRAINS, verdict_step=None, steps=4, overflows=1,
            final_loss_scale=16.0, parameters_moved=10, parameters_total=10, momentum_finite=True,
            max_weight_motion=0.4,
        )
        for place, cell in enumerate(builtin_experiments.build(name, {}).cells)
    ]  # fmt: skip


def one(name: str, runs: list[RunResult], **wanted: Any) -> int:
    """The place of the only run whose spec has these values."""
    (place,) = [place for place, run in enumerate(runs) if all(run.spec[key] == value for key, value in wanted.items())]
    return place


def read(name: str, runs: list[RunResult], place: int) -> Figure:
    made = figure(name, runs[place], runs)
    assert made is not None
    return made


def calm_boom_runs() -> list[RunResult]:
    return [
        replace(run, readings=Readings(norms=calm_boom_norms(spec.implementation, spec.step_ordering)))
        for run in results("mixed-overflow")
        for spec in [RunSpec.model_validate(run.spec)]
    ]


def test_published_norms_pass_under_every_ordering() -> None:
    runs = calm_boom_runs()

    assert [read("mixed-overflow", runs, place).differences for place in range(len(runs))] == [()] * 13


def test_an_ordering_is_not_taken_for_another() -> None:
    runs = calm_boom_runs()
    master = one("", runs, implementation="muon_core", zero_stage=1, step_ordering="master")
    ordered = one("", runs, implementation="muon_core", zero_stage=1, step_ordering="ordered")
    swapped = [replace(runs[ordered], readings=runs[master].readings)]

    assert read("mixed-overflow", swapped, 0).differences == (
        "calm is 6.5505 after step 1, published 3.4477",
        "calm is 9.3431 after step 2, published 6.5505",
        "boom is inf after step 1, published 2.6737",
        "boom is nan after step 2, published 5.0800",
        "the discarded step moved the norms from (3.447650909423828, 2.673692226409912) to (6.550536155700684, inf), "
        "published: no bit",
    )


def test_a_bit_on_a_discarded_step_is_seen_although_it_is_within_rounding() -> None:
    runs = calm_boom_runs()
    ordered = one("", runs, implementation="muon_core", zero_stage=1, step_ordering="ordered")
    norms = runs[ordered].readings.norms
    nudged = (norms[0], (math.nextafter(norms[1][0], 9), norms[1][1]), norms[2])

    (difference,) = read("calm-boom", [replace(runs[ordered], readings=Readings(norms=nudged))], 0).differences
    assert "published: no bit" in difference


def test_norms_that_are_missing_are_not_a_pass() -> None:
    runs = results("calm-boom")

    assert len(read("calm-boom", runs, 0).differences) == 6


def accumulation_runs(distance: float, calls: int, ordering: str = "master") -> tuple[list[RunResult], int]:
    """One batch and four micro-batches that end a relative `distance` apart."""
    runs = results("gradient-accumulation")
    at = {"implementation": "muon_core", "step_ordering": ordering}
    one_batch = one("", runs, **at, gradient_accumulation_steps=1)
    window = one("", runs, **at, gradient_accumulation_steps=4)
    base = np.full(100, 0.1)
    runs[one_batch] = replace(runs[one_batch], readings=Readings(weights=base, ns_calls=(2, 2, 2)))
    away = base.copy()
    away[0] += distance * float(np.linalg.norm(base))
    runs[window] = replace(runs[window], readings=Readings(weights=away, ns_calls=(calls, calls, calls)))
    return runs, window


def test_the_published_distance_and_calls_pass() -> None:
    runs, window = accumulation_runs(0.1337, calls=8)
    made = read("gradient-accumulation", runs, window)

    assert made == Figure(
        "16 calls in two steps, 0.1337 from one batch", "16 calls in two steps, 0.1337 from one batch", ()
    )


@pytest.mark.parametrize(
    ("distance", "calls", "ordering"), [(0.1337, 2, "master"), (0.11, 8, "master"), (2e-6, 2, "ordered")]
)
def test_other_distances_and_calls_fail(distance: float, calls: int, ordering: str) -> None:
    runs, window = accumulation_runs(distance, calls, ordering)

    assert len(read("gradient-accumulation", runs, window).differences) == 1


def test_a_bound_is_passed_by_anything_below_it() -> None:
    runs, window = accumulation_runs(3e-7, 2, "ordered")

    assert read("gradient-accumulation", runs, window).differences == ()


def test_without_the_run_it_is_compared_with_a_distance_fails() -> None:
    runs, window = accumulation_runs(3e-7, 2, "ordered")

    made = figure("gradient-accumulation", runs[window], [runs[window]])
    assert made is not None
    assert made.differences == ("not measured from one batch, published 1e-06",)


def scale_runs(implementation: str, share: float) -> tuple[list[RunResult], int]:
    """A halving scale's run that ends a share of the fixed one's motion away from it."""
    runs = results("scale-change")
    pair = [
        p for p, run in enumerate(runs) if run.spec["implementation"] == implementation and len(run.spec["faults"]) == 1
    ]
    base = np.full(100, 0.1)
    for place in pair:
        is_fixed = runs[place].spec["loss_scale"]["static"] is not None
        weights = base if is_fixed else base + share / 10
        kept = "bits" if is_fixed or not share else "other bits"
        runs[place] = replace(
            runs[place],
            readings=Readings(
                weights=weights, motion=1.0, norms=((1.0, 2.0 if kept == "bits" else 2.5),), parameters_hash=kept
            ),
        )
    return runs, next(place for place in pair if runs[place].spec["loss_scale"]["static"] is None)


@pytest.mark.parametrize(
    ("implementation", "share", "passes"),
    [("muon_core", 0.0, True), ("muon_core", 0.12, False), ("deepspeed", 0.12, True), ("deepspeed", 0.0, False)],
)
def test_a_moving_scale_must_change_nothing_of_ours_and_much_of_deepspeeds(
    implementation: str, share: float, passes: bool
) -> None:
    runs, moving = scale_runs(implementation, share)
    made = read("scale-change", runs, moving)

    assert (not made.differences) == passes
    assert made.measured == ("12.0 % off" if share else "equal to the last bit")


def test_equal_weights_with_other_momentum_are_not_equal_to_the_last_bit() -> None:
    runs, moving = scale_runs("muon_core", 0.0)
    readings = replace(runs[moving].readings, norms=((1.0, 2.0000001),))
    runs[moving] = replace(runs[moving], readings=readings)

    assert read("scale-change", runs, moving).differences == ("0.0 % off, expected equal to the last bit",)


@pytest.mark.parametrize(
    ("lr", "precision", "moved", "changed", "passes"),
    [
        (0.0, "fp16", 0, 10, True),
        (0.0, "fp32", 0, 0, True),
        (0.05, "fp16", 10, 10, True),
        (0.0, "fp16", 0, 0, False),
        (0.0, "fp16", 10, 10, False),
        (0.05, "fp16", 0, 10, False),
        (0.05, "fp32", 10, None, False),
    ],
)
def test_the_assertion_passes_without_training_wherever_a_cast_changes_all(
    lr: float, precision: str, moved: int, changed: int | None, passes: bool
) -> None:
    (run,) = [
        r for r in results("dtype-assertion") if r.spec["optimizer"]["lr"] == lr and r.spec["precision"] == precision
    ]
    run = replace(run, parameters_moved=moved, readings=Readings(changed_before_cast=changed))
    made = read("dtype-assertion", [run], 0)

    assert (not made.differences) == passes
    if passes and precision == "fp16":
        assert made.measured == f"{moved}/10 moved, the assertion passes (10/10)"


def test_a_releases_runs_say_what_they_did_and_are_held_to_no_published_figure() -> None:
    weights = np.ones(4)
    runs = [
        RunResult(
            run_id=str(place), spec=RunSpec.model_validate(cell.spec).model_dump(mode="json"),
            status=RunStatus.SUCCEEDED, verdict=Verdict.TRAINS, verdict_step=None, steps=3, overflows=0,
            final_loss_scale=1.0, parameters_moved=2, parameters_total=2, momentum_finite=True, max_weight_motion=0.4,
            readings=Readings(ns_calls=(8, 8, 8), weights=weights * (1 + place)),
        )
        for place, cell in enumerate(
            builtin_experiments.build("gradient-accumulation", {"deepspeed": "0.19.2"}).cells
        )
    ]  # fmt: skip

    assert [read("gradient-accumulation", runs, place) for place in range(2)] == [
        Figure("16 calls in two steps"),
        Figure("16 calls in two steps, 1 from one batch"),
    ]
    table = build_table(runs, builtin="gradient-accumulation")
    assert table.checks == [None, None]
    assert table.columns[-1] == "measured"


def test_the_known_assertion_is_told_before_the_run_has_ended() -> None:
    runs = [replace(run, parameters_moved=None, parameters_total=None) for run in results("dtype-assertion")]

    assert {read("dtype-assertion", runs, place).known for place in range(len(runs))} == {
        "0/10 moved, the assertion passes (10/10)",
        "10/10 moved, the assertion passes (10/10)",
        "0/10 moved, the assertion fails (0/10)",
    }


@pytest.mark.parametrize("name", ["thirty-step", "mixed-overflow", "gradient-accumulation", "scale-change",
                                  "dtype-assertion"])  # fmt: skip
def test_a_run_that_failed_before_its_first_step_passes_nowhere(name: str) -> None:
    nothing = {"verdict": Verdict.INCONCLUSIVE, "steps": 0, "overflows": 0, "final_loss_scale": None,
               "parameters_moved": None, "parameters_total": None, "momentum_finite": None,
               "max_weight_motion": None}  # fmt: skip
    runs = [replace(run, status=RunStatus.FAILED, **nothing) for run in results(name)]  # type: ignore[arg-type]

    checks = build_table(runs, builtin=name).checks
    said = [read(name, runs, place).measured for place in range(len(runs))]

    assert not [check for check in checks if check is not None and check.passed]
    assert not [text for text in said if "assertion" in text or text.startswith((" ", "/")) or "does not move" in text]
