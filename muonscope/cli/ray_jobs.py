"""What a command knows of the Ray job whose entrypoint it is."""

import json
import os
from collections.abc import Mapping
from typing import Any, Final

_JOB_CONFIG: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_PACKAGE: Final = "gcs://"


def with_working_dir(spec: dict[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a spec that names the code of its task: the working directory that `ray job submit` has uploaded.

    Args:
        spec: as its file holds it.
        environment: this process's; Ray tells a job's entrypoint there what the job was submitted with.
    """
    package = _uploaded(environment)
    if package is None or own_task(spec) is None or "working_dir" in spec:
        return spec
    return {**spec, "working_dir": package}


def own_task(spec: dict[str, Any]) -> str | None:
    """Return the `module:function` that a spec names as its task; None for a built-in one."""
    task = spec.get("task")
    name = task.get("name") if isinstance(task, dict) else None
    return name if isinstance(name, str) and ":" in name else None


def _uploaded(environment: Mapping[str, str]) -> str | None:
    try:
        package = json.loads(environment.get(_JOB_CONFIG, "{}"))["runtime_env"]["working_dir"]
    except (ValueError, KeyError, TypeError):
        return None
    return package if isinstance(package, str) and package.startswith(_PACKAGE) else None
