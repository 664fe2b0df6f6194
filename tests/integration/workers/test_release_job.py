"""Attempts under an unmodified DeepSpeed release, as Ray jobs: what is loaded is what was asked for."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, FailureKind, MomentumUnit
from tests.integration.releases.conftest import HOME, installed
from tests.integration.workers.local_ray import LocalRay
from tests.unit.workers.fake_controller import FakeController, running

VERSION = "0.19.2"
# Poisoned by its first overflow, as that release is.
SPEC = RunSpec.model_validate({"deepspeed": {"version": VERSION}, "optimizer": {"lr": 0.05}, "steps": 3})


def attempt(cluster: LocalRay, name: str, home: Path, **variables: str) -> FakeController:
    """Run one attempt to its end."""
    attempt_id = f"run-{os.getpid()}{name}-a1"
    with running(spec=SPEC, attempt_id=attempt_id, run_id=attempt_id) as controller:
        command = [sys.executable, "-m", "workers.driver", "--controller", controller.url, "--home", str(home)]
        command += ["--attempt", attempt_id, "--enrolment-token", controller.enrolment_token]
        cluster.submit(shlex.join(command), attempt_id, variables)
        cluster.wait_for_job(attempt_id)
    return controller


@pytest.mark.acceptance
def test_a_run_trains_under_the_release_it_names_and_records_its_file(cluster: LocalRay) -> None:
    folder = installed(VERSION)

    controller = attempt(cluster, "x", HOME)

    environment: dict[str, Any] = controller.facts["environment"]
    assert environment["versions"]["deepspeed"].split("+")[0] == VERSION
    assert environment["deepspeed_file"] == str(folder / "deepspeed" / "__init__.py")
    assert controller.facts["momentum_unit"] is MomentumUnit.LOSS_SCALED
    assert controller.outcome is not None
    assert (controller.outcome.status, controller.outcome.declared_steps) == (AttemptStatus.SUCCEEDED, 3)
    # The first step overflows: under 0.19.8 no momentum would be there yet, and none of it would be non-finite.
    assert controller.records[0].overflow
    assert controller.records[0].momentum_norm != 0.0


def test_a_release_that_cannot_be_installed_ends_the_attempt_with_the_remedy(cluster: LocalRay, tmp_path: Path) -> None:
    controller = attempt(cluster, "y", tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))

    assert controller.outcome is not None
    failure = controller.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.SETUP_FAILED, None)
    assert f"python -m workers.releases {VERSION}" in failure.message
    assert "No matching distribution found" in failure.message
