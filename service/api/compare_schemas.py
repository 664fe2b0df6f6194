"""How a comparison looks as JSON."""

from typing import Any, Literal

from muonscope.contract.status import ParameterRoute
from service.api.schemas import Out
from service.api.step_schemas import Measurement


class FieldDifference(Out):
    field: str
    """Dotted name in the spec."""
    a: Any
    b: Any


class SharedOut(Out):
    """What the runs prove by hash to have in common; null where one has no hash."""

    data: bool | None
    initial_parameters: bool | None


class DivergenceOut(Out):
    step: int
    scalar: str
    """The first that differs, in the order a step computes them."""
    scalars: list[str]
    a: Measurement | bool
    b: Measurement | bool
    parameter: str | None
    """The one whose momentum norm differs most there, whatever differs first."""
    parameters_differing: int


class NotComparedOut(Out):
    """What the two runs recorded under one name and is not the same quantity."""

    quantity: str
    a: str
    """What it is in the first run, such as `the norm of the update`."""
    b: str


class RouteDifferenceOut(Out):
    parameter: str
    a: ParameterRoute
    b: ParameterRoute


class RoutesOut(Out):
    """Parameters that both models have and that not the same optimizer takes."""

    num_differing: int
    differing: list[RouteDifferenceOut]
    """The first hundred, in the model's order."""


class ClippingOut(Out):
    limit: float
    scope: str
    """What is measured and scaled: `gradient`, `update` or `muon_exempt`."""
    applied: int
    """Applied steps, those alone whose norm was recorded where `acted` is known."""
    acted: int | None
    """On how many of them the norm was over the limit; null where it is not the recorded one."""


class ClippingsOut(Out):
    """Null for a run that never clips."""

    a: ClippingOut | None
    b: ClippingOut | None


class LearnedOut(Out):
    last: Measurement
    lowest: float | None
    """Of the finite ones of applied steps."""
    lowest_step: int | None
    mean_of_last: Measurement
    """Over the last tenth of the applied steps."""
    mean_of_last_steps: int


class LowerOut(Out):
    """The run whose loss is the lower one on every step that both recorded, from one on."""

    side: Literal["a", "b"]
    from_step: int
    until_step: int
    """The last step that both recorded."""


class LearningOut(Out):
    a: LearnedOut
    b: LearnedOut
    lower: LowerOut | None
    caveat: str | None
    """Why the losses cannot simply be held against each other."""


class CountPair(Out):
    a: int
    b: int


class DiscardedOut(Out):
    a: int
    b: int
    both: int
    a_runs: list[tuple[int, int]]
    """First and last step of each unbroken run of discarded steps."""
    b_runs: list[tuple[int, int]]
    overflows: CountPair


class TrajectoryOut(Out):
    initial: Measurement
    final: Measurement
    lowest: Measurement
    highest: Measurement
    num_changes: int
    changes: list[tuple[int, Measurement]]
    """(step, scale from there on), the first thousand; the last step's is told at the step that would follow."""


class TrajectoriesOut(Out):
    a: TrajectoryOut
    b: TrajectoryOut


class PairOut(Out):
    a: Measurement
    b: Measurement
    difference: float | None
    """b - a, where both are finite and of one quantity."""


class FinalOut(Out):
    steps: CountPair
    loss: PairOut
    momentum_norm: PairOut
    loss_scale_after: PairOut
    parameters_moved: PairOut
    parameters_total: PairOut
    max_weight_motion: PairOut
    nonfinite_parameters: PairOut
    parameters_equal: bool | None
    """Whether all final weights are bit-equal, by hash."""


class RatioOut(Out):
    a: float | None
    b: float | None
    ratio: float | None
    """b / a."""


class CostOut(Out):
    step_time_s: RatioOut
    """Medians, without the first step."""
    peak_memory_bytes: RatioOut
    ns_calls: RatioOut


class NamesOut(Out):
    a: str
    b: str


class CompareOut(Out):
    a: str
    b: str
    names: NamesOut
    """What the runs are called; several may be called the same."""
    spec_difference: list[FieldDifference]
    """Fields that can change the numbers."""
    is_pair: bool
    """Whether they differ in one field only."""
    shared: SharedOut
    bit_equal_until: int | None
    """Every step before this one is bit-equal; null where a run has no steps."""
    first_divergence: DivergenceOut | None
    explanation: str
    not_compared: list[NotComparedOut]
    routes: RoutesOut | None
    """Null where a run has not told which optimizer takes its parameters."""
    clipping: ClippingsOut
    learning: LearningOut
    discarded: DiscardedOut
    loss_scale: TrajectoriesOut
    """All null for a run whose precision has none."""
    final: FinalOut
    cost: CostOut
