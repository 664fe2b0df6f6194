"""Hugging Face's Trainer and Accelerate, the real ones, as the guide's scripts use them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.distributed.gang import Gang
from tests.integration.recording import loops
from tests.integration.recording.guide import ended, guide_script

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def trained(gang: Callable[[int], Gang], service: httpx.Client, tmp_path: Path) -> Run:
    """Run a script as one rank; returns the run that recorded it."""

    def run(text: str, *arguments: str) -> dict[str, Any]:
        (printed,) = gang(1).run(
            loops.script, text=text, url=str(service.base_url), folder=str(tmp_path), arguments=arguments
        )
        return ended(service, printed.split()[-1])

    return run


def _steps(service: httpx.Client, run: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = service.get(f"/runs/{run['id']}/steps").json()["steps"]
    return steps


def test_a_trainer_is_recorded_under_stock_muon_and_under_the_ordered_step(trained: Run, service: httpx.Client) -> None:
    stock, ordered = trained(guide_script("trainer.py")), trained(guide_script("trainer.py"), "--ordered")

    for run, name, ordering in ((stock, "stock Muon", "deferred"), (ordered, "ordered Muon", "ordered")):
        assert (run["name"], run["verdict"]["name"], run["spec"]["step_ordering"]) == (name, "trains", ordering)
        assert run["summary"]["steps"] == run["spec"]["steps"] == 12
        assert _steps(service, run)[0]["discarded"]
        assert run["spec"]["gradient_accumulation_steps"] == 2
    # Before anything has moved; a Trainer hands its engine shares of the step's loss, which are half of it here.
    assert _steps(service, stock)[0]["loss"] == _steps(service, ordered)[0]["loss"] > 5.0
    rates = [step["lr"] for step in _steps(service, ordered)]
    assert rates[0] == 0.02
    assert rates[-1] < rates[1]


def test_a_trainer_that_dies_of_its_loss_scale_has_that_verdict(trained: Run) -> None:
    scale = '"initial_scale_power": 20'
    text = guide_script("trainer.py").replace(scale, f'{scale}, "min_loss_scale": 2**20')
    train = "trainer.train()\n"
    assert train in text

    run = trained(text.replace(train, f"try:\n    {train}except Exception:\n    pass\n"))

    assert (run["verdict"]["name"], run["failure"]["kind"]) == ("dies", "loss_scale_exhausted")
    assert (run["verdict"]["step"], run["summary"]["steps"]) == (0, 0)


def test_an_error_in_a_trainer_is_the_runs_own(trained: Run) -> None:
    text = guide_script("trainer.py")
    callback = (
        "class Failing(TrainerCallback):\n    def on_step_end(self, *_, **__):\n        raise ZeroDivisionError\n"
    )
    train = "trainer.train()\n"
    caught = f"{callback}trainer.add_callback(Failing())\ntry:\n    {train}except ZeroDivisionError:\n    pass\n"

    run = trained(text.replace(train, caught))

    assert (run["status"], run["failure"]["kind"], run["summary"]["steps"]) == ("failed", "task_error", 1)


def test_a_trainer_without_deepspeed_is_refused_before_its_first_step(trained: Run) -> None:
    text = guide_script("trainer.py")
    begin, end = text.index("        deepspeed={"), text.index("    train_dataset=")
    plain = text[:begin].replace("fp16=True", "use_cpu=True") + "    ),\n" + text[end:]

    with pytest.raises(AssertionError, match="which is no DeepSpeed engine"):
        trained(plain)


def test_accelerates_engine_is_recorded_and_stepped_in_order(trained: Run, service: httpx.Client) -> None:
    run = trained(guide_script("accelerated.py"))

    assert (run["name"], run["verdict"]["name"], run["spec"]["step_ordering"]) == ("accelerated", "trains", "ordered")
    assert (run["summary"]["steps"], run["spec"]["gradient_accumulation_steps"]) == (20, 2)
    steps = _steps(service, run)
    assert [step["discarded"] for step in steps] == [True] + [False] * 19
    assert steps[-1]["loss"] < steps[1]["loss"]
