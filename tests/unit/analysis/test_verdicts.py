"""Each verdict beside the control that flips it."""

import dataclasses
import math
from array import array
from typing import Any

import pytest

from muonscope.contract.attempts import Failure, FinalState
from muonscope.contract.status import FailureKind, Finding, RunStatus, Verdict
from service.analysis.verdicts import Absorption, Found, Poison, RunRecord, absorption, judge
from service.columns import NAN, PLUS_INFINITY
from tests.unit.analysis.columns import columns

INF = math.inf
MOVED = FinalState(parameters_moved=10, parameters_total=10, muon_parameters_moved=5, muon_parameters_total=5)
STILL = FinalState(parameters_moved=0, parameters_total=10, muon_parameters_moved=0, muon_parameters_total=5)
EXHAUSTED = Failure(kind=FailureKind.LOSS_SCALE_EXHAUSTED, step=17)
TRAINED = RunRecord(columns(30), 30, RunStatus.SUCCEEDED, final=MOVED)
DEAD = RunRecord(
    columns(17, discarded=range(17), momentum_norm=[INF, *[math.nan] * 16]), 30, RunStatus.FAILED, EXHAUSTED, STILL,
    Poison(0, "layers.0.weight", PLUS_INFINITY),
)  # fmt: skip


def names(record: RunRecord) -> list[str]:
    return [found.name for found in judge(record)]


def found(record: RunRecord, name: Verdict | Finding) -> Found:
    return next(each for each in judge(record) if each.name is name)


def changed(record: RunRecord, **fields: Any) -> RunRecord:
    return dataclasses.replace(record, **fields)


def test_a_run_that_applied_steps_and_moved_everything_trains() -> None:
    assert names(TRAINED) == ["trains"]
    assert "10 of 10 parameters moved" in judge(TRAINED)[0].evidence


def test_what_a_discarded_step_recorded_is_not_said_to_be_finite() -> None:
    overflowed = columns(30, discarded=[0], grad_norm=[INF, *[1.0] * 29], loss=[math.nan, *[1.0] * 29])

    evidence = found(changed(TRAINED, columns=overflowed), Verdict.TRAINS).evidence

    assert "all that was recorded" not in evidence
    assert "the losses of applied steps" in evidence


@pytest.mark.parametrize(
    "control",
    [
        changed(TRAINED, columns=columns(29)),
        changed(TRAINED, status=RunStatus.STOPPED),
        changed(TRAINED, status=RunStatus.FAILED, failure=Failure(kind=FailureKind.WORKER_DIED)),
        changed(TRAINED, final=None),
        changed(TRAINED, final=FinalState(parameters_moved=9, parameters_total=10)),
    ],
)
def test_a_run_that_falls_short_of_training_is_inconclusive_and_says_why(control: RunRecord) -> None:
    assert names(control) == ["inconclusive"]
    assert len(judge(control)[0].evidence) > len("The record proves no verdict: .")


def test_a_death_whose_last_steps_did_not_arrive_is_at_the_step_that_the_workers_name() -> None:
    scales = [65536.0] * 15
    cut_short = changed(DEAD, columns=columns(15, discarded=range(15), loss_scale_after=scales))

    death = found(cut_short, Verdict.DIES)

    assert death.step == 17
    assert "65536" not in death.evidence
    assert "steps 15 to 16 did not arrive" in death.evidence


def test_a_death_whose_scale_was_not_measured_has_no_number_for_it() -> None:
    unmeasured = changed(DEAD, columns=columns(17, discarded=range(17), loss_scale_after=[None] * 17))
    assert "at its minimum, after 17" in found(unmeasured, Verdict.DIES).evidence


def test_b07_a_death_of_nan_losses_says_so_and_one_of_overflows_does_not() -> None:
    of_nan = columns(17, discarded=range(17), loss=[math.nan] * 17)
    of_one_nan = columns(17, discarded=range(17), loss=[math.nan] * 16 + [1.0])

    assert "Their losses were NaN" in found(changed(DEAD, columns=of_nan), Verdict.DIES).evidence
    assert "NaN:" not in found(changed(DEAD, columns=of_one_nan), Verdict.DIES).evidence


def test_the_published_death_is_all_it_is_with_its_steps() -> None:
    assert names(DEAD) == ["dies", "poisoned", "stalled"]
    dies = found(DEAD, Verdict.DIES)
    assert (dies.step, dies.parameter) == (17, "layers.0.weight")
    assert "17 discarded steps in a row" in dies.evidence
    poisoned = found(DEAD, Verdict.POISONED)
    assert (poisoned.step, poisoned.parameter) == (0, "layers.0.weight")
    assert "a discarded step" in poisoned.evidence
    assert "still NaN at step 16" in poisoned.evidence


def test_only_an_exhausted_loss_scale_is_a_death() -> None:
    control = changed(DEAD, failure=Failure(kind=FailureKind.TASK_ERROR))
    assert names(control) == ["poisoned", "stalled"]


def test_a_death_counts_only_the_last_discarded_steps_in_a_row() -> None:
    record = changed(DEAD, columns=columns(17, discarded=[2, 14, 15, 16]))
    assert "after 3 discarded steps in a row" in found(record, Verdict.DIES).evidence


def test_a_death_before_any_record_keeps_the_step_that_the_workers_name() -> None:
    record = changed(DEAD, columns=columns(0), final=None, poison=None)
    assert found(record, Verdict.DIES).step == 17


def test_poison_is_seen_in_the_norm_of_the_model_alone() -> None:
    record = changed(TRAINED, columns=columns(3, momentum_norm=[1.0, math.nan, 1.0]), planned_steps=3)
    assert names(record)[0] == "poisoned"
    assert found(record, Verdict.POISONED).step == 1
    assert "finite again at step 2" in found(record, Verdict.POISONED).evidence


@pytest.mark.parametrize(
    ("momentum_norm", "said"),
    [
        ([None, None, None, None], "At step 1, an applied step, the momentum of embedding became NaN."),
        ([0.5, 0.5, 0.5, 0.5], "became NaN; the norm of Muon's own momentum stays finite."),
        ([0.5, math.nan, math.nan, None], "became NaN and the norm is still NaN at step 2."),
        ([0.5, math.nan, 0.5, None], "became NaN; the recorded norm is finite again at step 2."),
        ([0.5, math.nan, None, None], "became NaN and the norm is still NaN at step 1."),
    ],
)
def test_a_norm_that_was_not_measured_is_not_told_to_be_finite_again(
    momentum_norm: list[float | None], said: str
) -> None:
    record = changed(TRAINED, columns=columns(4, momentum_norm=momentum_norm), poison=Poison(1, "embedding", NAN))

    assert found(record, Verdict.POISONED).evidence.endswith(said)


def test_a_momentum_that_was_not_measured_is_not_poisoned() -> None:
    record = changed(TRAINED, columns=columns(3, momentum_norm=[None, None, None]), planned_steps=3)
    assert names(record) == ["trains"]


def test_a_non_finite_loss_diverges_only_on_an_applied_step() -> None:
    losses = [1.0, INF, 1.0]
    applied = changed(TRAINED, columns=columns(3, loss=losses), planned_steps=3)
    discarded = changed(TRAINED, columns=columns(3, loss=losses, discarded=[1]), planned_steps=3)

    assert names(applied) == ["diverged"]
    assert (found(applied, Verdict.DIVERGED).step, "Infinity" in judge(applied)[0].evidence) == (1, True)
    assert names(discarded) == ["trains"]


def test_non_finite_weights_diverge_at_the_step_that_made_them() -> None:
    record = changed(TRAINED, columns=columns(3, nonfinite_parameters=[0, 2, 2], loss=[1, 1, math.nan]))
    assert found(record, Verdict.DIVERGED).step == 1
    assert "2 parameters are non-finite" in found(record, Verdict.DIVERGED).evidence


def test_non_finite_weights_at_the_end_diverge_without_a_step() -> None:
    record = changed(TRAINED, final=MOVED.model_copy(update={"nonfinite_parameters": 1}))
    assert (names(record), judge(record)[0].step) == (["diverged"], None)


def test_a_bias_that_moves_hides_no_matrix_that_does_not() -> None:
    record = changed(TRAINED, final=MOVED.model_copy(update={"parameters_moved": 5, "muon_parameters_moved": 0}))
    control = changed(TRAINED, final=MOVED.model_copy(update={"muon_parameters_moved": 1}))

    assert names(record) == ["stalled"]
    assert names(control) == ["trains"]


def test_a_model_without_muon_parameters_is_not_stalled() -> None:
    final = FinalState(parameters_moved=2, parameters_total=2, muon_parameters_moved=0, muon_parameters_total=0)
    assert names(changed(TRAINED, final=final)) == ["trains", "no_muon"]
    assert names(changed(TRAINED, final=final, has_muon_optimizer=False)) == ["trains"]


def test_a_run_whose_every_step_was_discarded_is_stalled_without_a_final_state() -> None:
    record = changed(TRAINED, columns=columns(30, discarded=range(30)), final=None, status=RunStatus.STOPPED)
    assert names(record) == ["stalled"]


def test_finite_momentum_that_moves_on_a_discarded_step_is_absorbed_beside_training() -> None:
    moved = Absorption(2, 3, 1, 0, 55.1596, 104.8011)
    record = changed(TRAINED, absorption=moved, parameter_names=["calm.weight"])

    assert names(record) == ["absorbed", "trains"]
    absorbed = found(record, Verdict.ABSORBED)
    assert (absorbed.step, absorbed.parameter) == (1, "calm.weight")
    assert "55.1596 to 104.801" in absorbed.evidence
    assert "2 of 3 discarded steps" in absorbed.evidence


def test_a_move_is_written_with_the_digits_that_show_it() -> None:
    moved = Absorption(1, 1, 1, 0, 0.09016780555248261, 0.09016781300306320)
    absorbed = found(changed(TRAINED, absorption=moved, parameter_names=["w"]), Verdict.ABSORBED)

    assert "moved from 0.09016781 to 0.09016781 on" not in absorbed.evidence
    assert "moved from 0.090167806 to 0.090167813 on" in absorbed.evidence


def _norms(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_absorption_counts_finite_moves_only() -> None:
    pairs = [
        (0, b"", _norms(1.0, 0.0)),
        (1, _norms(1.0, 2.0), _norms(1.0, 2.0)),
        (2, _norms(1.0, 2.0), _norms(INF, math.nan)),
        (3, _norms(INF, 2.0), _norms(math.nan, 2.5)),
    ]
    assert absorption(pairs, 4) == Absorption(2, 4, 0, 0, 0.0, 1.0)


def test_momentum_that_stays_is_not_absorbed() -> None:
    assert absorption([(5, _norms(1.0, INF), _norms(1.0, INF))], 1) is None
    assert absorption([(5, _norms(1.0), _norms(1.0, 2.0))], 1) is None
    assert absorption([], 0) is None


def test_a_loss_that_rose_is_a_lesser_finding_and_one_that_fell_is_none() -> None:
    rose = changed(TRAINED, columns=columns(30, loss=[1.0] * 29 + [1.5]))
    fell = changed(TRAINED, columns=columns(30, loss=[2.0] + [1.0] * 29))

    assert names(rose) == ["trains", "loss_rose"]
    assert names(fell) == ["trains"]


def test_one_noisy_batch_at_the_end_of_a_long_run_is_no_trend() -> None:
    losses = [3.0 - step / 1000 for step in range(1000)]
    losses[-1] = 9.0
    assert names(changed(TRAINED, columns=columns(1000, loss=losses), planned_steps=1000)) == ["trains"]


def test_verdicts_come_gravest_first() -> None:
    worst = changed(
        DEAD,
        columns=columns(17, discarded=range(1, 17), loss=[math.nan] * 17, momentum_norm=[math.nan] * 17),
        poison=Poison(0, "w", NAN),
        absorption=Absorption(1, 16, 1, 0, 1.0, 2.0),
    )
    gravity = list(Verdict)
    verdicts = [each.name for each in judge(worst) if isinstance(each.name, Verdict)]
    assert verdicts == sorted(verdicts, key=gravity.index)
    assert len(verdicts) == 5


def test_a_finding_is_plain_json() -> None:
    assert judge(TRAINED)[0].as_json()["name"] == "trains"
    assert {type(value) for each in judge(DEAD) for value in each.as_json().values()} <= {str, int, type(None)}
