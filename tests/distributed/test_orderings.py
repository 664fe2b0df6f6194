"""The six orderings on one arithmetic: equal until the first overflow, apart after it as their table says."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import cases
from tests.distributed.gang import Gang

Gangs = Callable[[int], Gang]
STAGES = (1, 2, 3)
ORDERINGS = ("ordered", "master", "per_tensor", "inverted", "precheck", "deferred")
UNTOUCHED = {"ordered", "precheck", "deferred"}
OVERFLOW_AT = 3


def bits(run: dict[str, Any], steps: range) -> list[tuple[str, str]]:
    return [(run["rows"][step]["momentum"], run["rows"][step]["weights"]) for step in steps]


@pytest.fixture(scope="module", params=STAGES)
def runs(gang: Gangs, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """Every ordering, by rank, through one overflow that only rank 1 sees."""
    return {
        ordering: gang(2).run_once(cases.train, stage=request.param, ordering=ordering, plants=[(OVERFLOW_AT, 0, 1)])
        for ordering in ORDERINGS
    }


def test_all_six_are_equal_to_the_last_bit_until_the_first_overflow(runs: dict[str, list[dict[str, Any]]]) -> None:
    expected = bits(runs["ordered"][0], range(OVERFLOW_AT))

    for ordering in ORDERINGS:
        assert bits(runs[ordering][0], range(OVERFLOW_AT)) == expected, ordering
    assert len({momentum for momentum, _ in expected}) == OVERFLOW_AT, "the momentum never moved"


def test_after_it_exactly_precheck_deferred_and_ordered_stay_equal(runs: dict[str, list[dict[str, Any]]]) -> None:
    after = range(OVERFLOW_AT, 8)
    expected = bits(runs["ordered"][0], after)

    assert {name for name in ORDERINGS if bits(runs[name][0], after) == expected} == UNTOUCHED | _finite_everywhere(
        runs
    )


def _finite_everywhere(runs: dict[str, list[dict[str, Any]]]) -> set[str]:
    """When every tensor of the step is non-finite, the per-tensor guards keep all of them too."""
    kept = runs["per_tensor"][0]["rows"]
    all_kept = kept[OVERFLOW_AT]["momentum_by_parameter"] == kept[OVERFLOW_AT - 1]["momentum_by_parameter"]
    return {"per_tensor", "inverted"} if all_kept else set()


def test_every_ordering_discards_the_same_step(runs: dict[str, list[dict[str, Any]]]) -> None:
    for ordering in ORDERINGS:
        assert all(run["rows"][OVERFLOW_AT]["discarded"] for run in runs[ordering]), ordering
        assert not any(row["discarded"] for row in runs[ordering][0]["rows"][:OVERFLOW_AT]), ordering


def test_master_is_poisoned_for_ever(runs: dict[str, list[dict[str, Any]]]) -> None:
    rows = runs["master"][0]["rows"]

    assert not all(rows[OVERFLOW_AT]["momentum_finite"].values())
    assert all(row["discarded"] and not all(row["momentum_finite"].values()) for row in rows[OVERFLOW_AT:])


def test_each_pays_what_its_table_says(runs: dict[str, list[dict[str, Any]]]) -> None:
    steps = len(runs["ordered"][0]["rows"])

    assert runs["ordered"][0]["all_reduces"] == runs["master"][0]["all_reduces"] == 0
    assert runs["precheck"][0]["all_reduces"] == steps
    assert runs["deferred"][0]["all_reduces"] == 0
    # One staged copy of the fp32 momentum: half of the matrices' 2328 elements, padding included.
    assert 4 * 2328 / 2 <= runs["deferred"][0]["staged_bytes"] <= 4 * 2328 / 2 + 64
    assert runs["ordered"][0]["staged_bytes"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_calm_and_boom_part_the_orderings(gang: Gangs, stage: int) -> None:
    generator = [0.5 + 0.01 * i for i in range(32)]
    rows = {
        ordering: gang(1).run_once(
            cases.calm_boom,
            stage=stage,
            ordering=ordering,
            implementation="muon_core",
            calm=generator,
            boom=generator,
            steps=3,
        )[0]
        for ordering in ORDERINGS
    }

    assert {tuple(rows[name][0]["after"]) for name in ORDERINGS} == {tuple(rows["ordered"][0]["after"])}
    assert len({rows[name][0]["bits"] for name in ORDERINGS}) == 1
    held = {name: rows[name][1]["bit_equal"] for name in ORDERINGS}
    assert held == {
        "ordered": [True, True],
        "precheck": [True, True],
        "deferred": [True, True],
        "master": [False, False],
        "per_tensor": [False, True],
        "inverted": [False, True],
    }
    calm = {name: rows[name][1]["after"][0] for name in ORDERINGS}
    assert calm["inverted"] == pytest.approx(calm["ordered"], rel=1e-6)
    assert calm["per_tensor"] == calm["master"] > 1.5 * calm["ordered"]


@pytest.mark.parametrize("ordering", ["precheck", "deferred", "ordered"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_another_ranks_partition_holds_the_momentum_here_too(
    gang: Gangs, stage: int, ordering: str
) -> None:
    def held(name: str) -> list[list[bool]]:
        inputs = [0.5 + 0.01 * i for i in range(32)]
        runs = gang(2).run_once(
            cases.calm_boom, stage=stage, ordering=name, implementation="muon_core", calm=inputs, boom=inputs, steps=2
        )
        return [run[1]["bit_equal"] for run in runs]

    # At stages 1 and 2 the first rank holds calm alone, whose gradients are finite.
    assert held(ordering) == ([[True], [True]] if stage < 3 else [[True, True], [True, True]])
    assert held("master") == ([[False], [False]] if stage < 3 else [[False, False], [False, False]])


@pytest.mark.parametrize("ordering", ["master", "per_tensor", "inverted"])
def test_at_stage_three_early_orderings_move_once_per_micro_batch(gang: Gangs, ordering: str) -> None:
    arguments = {"stage": 3, "gas": 4, "steps": 2, "implementation": "muon_core"}
    early = gang(2).run_once(cases.gradient_accumulation, ordering=ordering, **arguments)[0]
    late = gang(2).run_once(cases.gradient_accumulation, ordering="ordered", **arguments)[0]

    assert (early["ns_calls"], late["ns_calls"]) == (16, 4)
    # What steps report adds up to what was counted: none of a window's micro-batches is left out.
    assert (sum(early["ns_calls_by_step"]), sum(late["ns_calls_by_step"])) == (16, 4)


@pytest.mark.parametrize("ordering", ["master", "per_tensor", "inverted"])
def test_the_norm_is_of_the_whole_window_although_the_momentum_moves_in_it(gang: Gangs, ordering: str) -> None:
    arguments = {"stage": 3, "gas": 3, "steps": 1, "precision": "fp32"}
    early = gang(2).run_once(cases.train, ordering=ordering, **arguments)[0]["rows"][0]
    late = gang(2).run_once(cases.train, ordering="ordered", **arguments)[0]["rows"][0]

    # The same weights see the same samples; sums in float32 differ in their order.
    assert early["grad_norm"] == pytest.approx(late["grad_norm"], rel=1e-6)
    assert early["momentum"] != late["momentum"]


@pytest.mark.parametrize("ordering", ["master", "per_tensor", "inverted"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_an_overflow_in_any_micro_batch_is_seen_at_stage_three(gang: Gangs, ordering: str, micro_batch: int) -> None:
    runs = gang(2).run_once(cases.train, stage=3, ordering=ordering, gas=3, steps=3, plants=[(1, micro_batch, 1)])

    for run in runs:
        assert [row["discarded"] for row in run["rows"]][:2] == [False, True]
        assert run["rows"][1]["weights"] == run["rows"][0]["weights"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ordering", ["precheck", "deferred"])
def test_guarded_orderings_equal_ordered_under_accumulation(gang: Gangs, stage: int, ordering: str) -> None:
    arguments = {"stage": stage, "gas": 3, "steps": 4, "plants": [(1, 1, 0)]}
    guarded = gang(2).run_once(cases.train, ordering=ordering, **arguments)[0]
    ordered = gang(2).run_once(cases.train, ordering="ordered", **arguments)[0]

    assert bits(guarded, range(4)) == bits(ordered, range(4))
