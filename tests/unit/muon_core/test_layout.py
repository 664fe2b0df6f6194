"""Cutting parameters into partitions, and planning who orthogonalizes what: arithmetic, held for all sizes."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_core.parameters import MatrixShape
from muon_core.zero.exchange import ExchangePlan, orthogonalization_cost, plan_exchange
from muon_core.zero.layout import (
    Fragment,
    MomentumView,
    PlacedParameter,
    ViewCache,
    cut_evenly,
    cut_into_partitions,
)

shapes = st.builds(MatrixShape, st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))
world_sizes = st.integers(1, 7)


def lay_out_end_to_end(matrices: list[MatrixShape], world_size: int) -> list[PlacedParameter]:
    size = -(-sum(shape.numel for shape in matrices) // world_size)
    placed, first = [], 0
    for index, shape in enumerate(matrices):
        placed.append(
            PlacedParameter(index, shape.numel, cut_into_partitions(first, shape.numel, size, world_size), shape)
        )
        first += shape.numel
    return placed


def lay_out_in_pieces(matrices: list[MatrixShape], world_size: int) -> list[PlacedParameter]:
    placed, offset = [], 0
    for index, shape in enumerate(matrices):
        piece = -(-shape.numel // world_size)
        placed.append(PlacedParameter(index, shape.numel, cut_evenly(shape.numel, piece, offset, world_size), shape))
        offset += piece
    return placed


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 30), world_sizes)
def test_a_cut_parameter_is_whole_again_in_rank_order(first: int, numel: int, size: int, world_size: int) -> None:
    fragments = cut_into_partitions(first, numel, size, world_size)
    elements = [
        (rank * size + fragment.offset + i - first, fragment.start + i)
        for rank, fragment in enumerate(fragments)
        for i in range(fragment.numel)
    ]

    assert all(flat == within for flat, within in elements)
    assert [within for _, within in elements] == list(range(max(0, min(numel, size * world_size - first))))


@given(st.integers(0, 100), world_sizes)
def test_even_pieces_cover_a_parameter_once(numel: int, world_size: int) -> None:
    fragments = cut_evenly(numel, -(-numel // world_size), 5, world_size)

    covered = [fragment.start + i for fragment in fragments for i in range(fragment.numel)]
    assert covered == list(range(numel))
    assert {fragment.offset for fragment in fragments} == {5}


@given(
    st.lists(shapes, max_size=12),
    world_sizes,
    st.integers(1, 400),
    st.sampled_from([lay_out_end_to_end, lay_out_in_pieces]),
)
def test_every_parameter_is_orthogonalized_exactly_once(matrices, world_size, bucket, lay_out) -> None:  # type: ignore[no-untyped-def]
    parameters = lay_out(matrices, world_size)

    plan = plan_exchange(parameters, world_size, bucket)

    assert sorted(_positions(plan)) == list(range(len(parameters)))
    for rank, positions in enumerate(plan.whole):
        assert all(parameters[p].fragments[rank].numel == parameters[p].numel for p in positions)
    for chunk in plan.chunks:
        assert len(chunk) == 1 or sum(parameters[t.position].numel for t in chunk) <= bucket
        assert all(sum(f.numel > 0 for f in parameters[t.position].fragments) > 1 for t in chunk)
        assert all(0 <= t.owner < world_size for t in chunk)


def _positions(plan: ExchangePlan) -> list[int]:
    return [p for positions in plan.whole for p in positions] + [t.position for chunk in plan.chunks for t in chunk]


@given(st.lists(shapes, min_size=1, max_size=30), st.integers(2, 6))
def test_travellers_even_out_the_ranks_costs(matrices: list[MatrixShape], world_size: int) -> None:
    parameters = lay_out_in_pieces(matrices, world_size)
    plan = plan_exchange(parameters, world_size, 10**9)
    travelling = [t for chunk in plan.chunks for t in chunk]
    load = [
        sum(orthogonalization_cost(parameters[t.position]) for t in travelling if t.owner == rank)
        for rank in range(world_size)
    ]

    # Greedy, dearest first: no rank exceeds another by more than one parameter.
    largest = max((orthogonalization_cost(parameters[t.position]) for t in travelling), default=0.0)
    assert max(load) - min(load) <= largest


def test_at_stages_one_and_two_only_straddling_matrices_travel() -> None:
    parameters = lay_out_end_to_end([MatrixShape(1, 10, 10)] * 8, 3)

    plan = plan_exchange(parameters, 3, 10**6)

    assert sum(len(chunk) for chunk in plan.chunks) == 2
    assert [len(positions) for positions in plan.whole] == [2, 2, 2]


def test_an_owner_that_already_holds_most_is_preferred() -> None:
    fragments = (Fragment(0, 10, 0), Fragment(10, 90, 0))
    plan = plan_exchange([PlacedParameter(0, 100, fragments, MatrixShape(1, 10, 10))], 2, 10**6)

    assert [t.owner for t in plan.chunks[0]] == [1]


def test_equal_shapes_are_adjacent_so_that_owners_can_batch_them() -> None:
    matrices = [MatrixShape(1, 4, 8), MatrixShape(1, 6, 6)] * 4
    plan = plan_exchange(lay_out_in_pieces(matrices, 2), 2, 10**6)

    kinds = [matrices[t.position] for t in plan.chunks[0]]
    assert sum(a != b for a, b in pairwise(kinds)) == 1


def test_cached_views_are_made_anew_only_for_a_new_buffer() -> None:
    cache, made = ViewCache(), []

    def make(buffer: torch.Tensor) -> list[MomentumView]:
        made.append(buffer)
        return [MomentumView(0, buffer.narrow(0, 0, 2), "muon")]

    old, new = torch.zeros(4), torch.ones(4)
    first = cache.views([old], lambda: make(old))
    again = cache.views([old], lambda: make(old))
    moved = cache.views([new], lambda: make(new))

    assert first is again
    assert len(made) == 2
    assert moved[0].view.tolist() == [1.0, 1.0]
