"""Where stages differ in a bit, traced: DeepSpeed averages in another order, and the order is this one.

    micro-batches   stage 1 adds up a rank's own, then averages over ranks; stages 2 and 3 average each, then add up
    ranks           each gradient is divided by their number and then added up, in any order; but with `reduce_scatter`
                    off, stages 1 and 2 add up first and divide then

    clipping        the gradient's norm is added up from shards, which stage 3 cuts elsewhere: its last bits differ, and
                    with them, where it exceeds the limit, all that is scaled by it

Two ranks and one micro-batch leave no order to choose, and halving is exact, but for float16's subnormal numbers.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import cases, reduction_cases
from tests.distributed.gang import Gang
from tests.distributed.readings import relative

Gangs = Callable[[int], Gang]
STAGES = (1, 2, 3)
SMALLEST_NORMAL = torch.finfo(torch.float16).tiny


def added(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


def averages(tensors: Sequence[Tensor], *, divides_first: bool) -> list[Tensor]:
    """The mean over ranks, added up in every order that there is."""
    count = len(tensors)
    if divides_first:
        tensors = [tensor / count for tensor in tensors]
        return [added(order) for order in itertools.permutations(tensors)]
    return [added(order) * (1 / count) for order in itertools.permutations(tensors)]


def by_hand(run: dict[str, Any], *, own_first: bool, divides_first: bool) -> list[list[Tensor]]:
    """What DeepSpeed can have made of each parameter's gradients."""
    made = []
    for index in range(len(run["averaged"])):
        own = [[micro_batch[index] for micro_batch in rank] for rank in run["own"]]
        if own_first:
            made.append(averages([added(rank) for rank in own], divides_first=divides_first))
        else:
            means = [averages(of_ranks, divides_first=divides_first)[0] for of_ranks in zip(*own, strict=True)]
            made.append([added(means)])
    return made


def share_explained(run: dict[str, Any], candidates: list[list[Tensor]]) -> float:
    """The share of elements that are, to the last bit, among the candidates."""
    found = [
        torch.stack([candidate.float() == actual for candidate in of_parameter]).any(0)
        for actual, of_parameter in zip(run["averaged"], candidates, strict=True)
    ]
    return torch.cat(found).double().mean().item()


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_are_added_up_before_the_average_at_stage_one_and_after_it_above(gang: Gangs, stage: int) -> None:
    run = gang(2).run_once(reduction_cases.reduced, stage=stage, precision="fp32", gas=3)[0]

    assert share_explained(run, by_hand(run, own_first=stage == 1, divides_first=True)) == 1.0
    # The control: it is not the other order.
    assert share_explained(run, by_hand(run, own_first=stage > 1, divides_first=True)) < 0.9


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_divide_before_they_add_up_unless_nothing_is_scattered(
    gang: Gangs, stage: int, scatters: bool
) -> None:
    zero = {"reduce_scatter": scatters}
    run = gang(3).run_once(reduction_cases.reduced, stage=stage, precision="fp32", zero=zero)[0]
    divides_first = scatters or stage == 3

    assert share_explained(run, by_hand(run, own_first=True, divides_first=divides_first)) == 1.0
    assert share_explained(run, by_hand(run, own_first=True, divides_first=not divides_first)) < 0.9


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_halving_a_subnormal_gradient_rounds_and_only_there_does_it_matter_when(
    gang: Gangs, stage: int, scatters: bool
) -> None:
    run = gang(2).run_once(
        reduction_cases.reduced, stage=stage, precision="fp16", loss_factor=0.01, zero={"reduce_scatter": scatters}
    )[0]
    first, then = (by_hand(run, own_first=True, divides_first=divides) for divides in (True, False))
    parts_ways = torch.cat([a[0] != b[0] for a, b in zip(first, then, strict=True)])
    smallest = torch.cat([torch.minimum(*(rank[0][i].abs() for rank in run["own"])) for i in range(len(first))])

    assert share_explained(run, first if scatters or stage == 3 else then) == 1.0
    assert 0 < parts_ways.double().mean() < 0.5
    assert bool((smallest[parts_ways] < 2 * SMALLEST_NORMAL).all())


# At a loss scale of 4, four steps on full-rank batches: 1.3e-4, which Newton-Schulz makes of the lost last bits.
@pytest.mark.parametrize(("scatters", "tolerance"), [(True, 0.0), (False, 1e-3)])
def test_what_subnormal_gradients_leave_between_stages_is_stated(gang: Gangs, scatters: bool, tolerance: float) -> None:
    ends = [
        gang(2).run_once(
            cases.train, stage=stage, power=2, micro_batch=64, steps=4, keep_weights=True,
            zero={"reduce_scatter": scatters},
        )[0]["weights"]
        for stage in STAGES
    ]  # fmt: skip

    assert relative(ends[0], ends[1]) == 0
    assert (relative(ends[0], ends[2]) > 0) == (tolerance > 0)
    assert relative(ends[0], ends[2]) <= tolerance


def test_where_clipping_acts_stage_three_differs_by_its_norms_last_bits(gang: Gangs) -> None:
    """The norm is added up from shards: halves of the flat group at stages 1 and 2, of each parameter at stage 3."""
    runs = [
        gang(2).run_once(cases.train, stage=stage, precision="fp32", steps=4, clip=0.1, keep_weights=True)[0]
        for stage in STAGES
    ]
    first_norms = [run["rows"][0]["grad_norm"] for run in runs]
    unclipped = [
        gang(2).run_once(cases.train, stage=stage, precision="fp32", steps=4, keep_weights=True)[0] for stage in STAGES
    ]

    assert min(first_norms) > 0.1, "clipping was never active"
    assert first_norms[0] == first_norms[1]
    assert abs(first_norms[2] - first_norms[0]) <= 4 * torch.finfo(torch.float32).eps * first_norms[0]
    assert relative(runs[0]["weights"], runs[1]["weights"]) == 0
    assert relative(runs[0]["weights"], runs[2]["weights"]) <= 1e-5
    # The control: it is the clipping alone.
    assert relative(unclipped[0]["weights"], unclipped[2]["weights"]) == 0
