"""Learning-rate schedules: what share of the rate each step has."""

import pytest

from muonscope.contract.run_spec import LearningRateSchedule
from workers.schedule import Schedule, share_at


class Optimizer:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.02}, {"lr": 0.001}]


def shares(steps: int, **settings: object) -> list[float]:
    schedule = LearningRateSchedule.model_validate(settings)
    return [round(share_at(schedule, step, steps), 6) for step in range(steps)]


def test_warm_up_rises_evenly_and_then_stays() -> None:
    assert shares(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_decay_begins_at_one_and_ends_at_its_last_share() -> None:
    assert shares(5, decay="linear", final_share=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert shares(5, decay="cosine") == [1.0, 0.853553, 0.5, 0.146447, 0.0]
    assert shares(5, warmup_steps=2, decay="linear") == [0.5, 1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_one_step_after_the_warm_up_has_the_last_share(decay: str) -> None:
    assert shares(3, warmup_steps=2, decay=decay, final_share=0.5)[-1] == 0.5


def test_every_group_keeps_its_own_rate() -> None:
    optimizer = Optimizer()
    schedule = Schedule(optimizer, LearningRateSchedule(warmup_steps=2), 4)
    first = schedule.get_last_lr()
    schedule.step()

    assert first == [0.01, 0.0005]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.001]


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    settings = LearningRateSchedule(decay="linear")
    one, other = Schedule(Optimizer(), settings, 10), Schedule(Optimizer(), settings, 10)
    for _ in range(4):
        one.step()
    other.load_state_dict(one.state_dict())

    assert other.get_lr() == one.get_lr() != Schedule(Optimizer(), settings, 10).get_lr()
