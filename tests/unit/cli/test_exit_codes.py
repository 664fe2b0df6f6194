"""What the shell learns, for every status, failure and verdict."""

import pytest

from muonscope.cli.exit_codes import exit_code, worst
from muonscope.client import Run
from muonscope.contract.status import FailureKind, Verdict
from tests.unit.client.fake_service import run_json


def run(status: str, verdict: str | None = None, failure: str | None = None) -> Run:
    return Run.model_validate(
        run_json(
            status=status,
            verdict=verdict and {"name": verdict, "step": None, "parameter": None, "evidence": ""},
            failure=failure and {"kind": failure},
        )
    )


@pytest.mark.parametrize("verdict", Verdict)
def test_a_run_that_succeeded_ends_by_its_verdict(verdict: Verdict) -> None:
    assert exit_code(run("succeeded", verdict)) == (0 if verdict is Verdict.TRAINS else 3)


@pytest.mark.parametrize("kind", FailureKind)
def test_only_deaths_that_are_verdicts_count_as_verdicts(kind: FailureKind) -> None:
    deaths = {FailureKind.LOSS_SCALE_EXHAUSTED, FailureKind.NO_PROGRESS}

    assert exit_code(run("failed", "dies", kind)) == (3 if kind in deaths else 1)


def test_a_stopped_run_is_stopped_whatever_it_showed() -> None:
    assert exit_code(run("stopped", "trains")) == 130


@pytest.mark.parametrize("status", ["succeeded", "failed"])
def test_an_end_without_verdict_or_reason_is_a_failure(status: str) -> None:
    assert exit_code(run(status)) == 1


@pytest.mark.parametrize(("codes", "expected"), [([], 0), ([0, 0], 0), ([0, 3], 3), ([3, 1, 0], 1), ([1, 130, 3], 130)])
def test_many_runs_end_by_the_gravest(codes: list[int], expected: int) -> None:
    assert worst(codes) == expected
