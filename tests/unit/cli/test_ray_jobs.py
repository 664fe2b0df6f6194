"""What `muonscope run` finds out about the Ray job it is in."""

import json
from typing import Any

import pytest

from muonscope.cli.ray_jobs import with_working_dir

PACKAGE = "gcs://_ray_pkg_0123456789abcdef.zip"
IN_A_JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"working_dir": PACKAGE}})}
OWN_TASK = {"task": {"name": "mine:build"}}


def test_a_task_of_ones_own_takes_the_uploaded_package_along() -> None:
    assert with_working_dir(OWN_TASK, IN_A_JOB) == {**OWN_TASK, "working_dir": PACKAGE}


@pytest.mark.parametrize(
    ("spec", "environment"),
    [
        (OWN_TASK, {}),
        (OWN_TASK, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}),
        (OWN_TASK, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "no json"}),
        (OWN_TASK, {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"working_dir": "/a/folder"}})}),
        ({"task": {"name": "simple_model"}}, IN_A_JOB),
        ({"task": "nonsense"}, IN_A_JOB),
        ({**OWN_TASK, "working_dir": "gcs://another"}, IN_A_JOB),
    ],
)
def test_everything_else_stays_as_it_is_written(spec: dict[str, Any], environment: dict[str, str]) -> None:
    assert with_working_dir(spec, environment) == spec
