"""The whole path on a real local Ray: `muonscope up`, real drivers, real actors, real training.

One service and one Ray for the module; the tests run in order and the last one ends both. What is killed and broken on
the way is in tests/faults.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.controller.local_ray import find_processes
from tests.installation import ENDED, STEADY, Installation, processes_with

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = DOCS / "guides" / "ray-jobs.md"
TUTORIAL = DOCS / "tutorial.md"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("home"), settings={"allow_tasks": "laptop_task:build"}) as one:
        yield one


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """A folder as somebody submits it: a task of their own, and the spec that names it, both as the guide has them."""
    text = GUIDE.read_text(encoding="utf-8")
    (task,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (spec,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "laptop_task.py").write_text(task, encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(spec, encoding="utf-8")
    return tmp_path


def ray_job(installation: Installation, *words: str) -> "subprocess.Popen[str]":
    """Start `ray job …` as on a laptop: it knows the cluster's address and its token, and nothing of the service."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MUONSCOPE_", "RAY_"))}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(installation.home / "ray" / "auth_token")}
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "job", words[0], "--address", installation.head()["address"],
         *words[1:]],
        env=kept | token, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_submitted_run_trains_and_its_record_is_complete(installation: Installation) -> None:
    run_id = installation.submit(steps=30)
    run = installation.wait_for(run_id, *ENDED)
    assert (run["status"], run["verdict"]["name"]) == ("succeeded", "trains"), run["failure"]
    steps = installation.client.get(f"/runs/{run_id}/steps").json()["steps"]
    assert [step["step"] for step in steps] == list(range(30))
    attempt = run["attempts"][0]
    phases = ["submitted", "job_submitted", "driver_started", "enrolled", "workers_started", "first_step", "finished"]
    times = [attempt["phases"][phase] for phase in phases]
    assert times == sorted(times)
    assert [rank["rank"] for rank in attempt["ranks"]] == [0, 1]
    assert "enrolment" not in json.dumps(run)
    assert installation.client.get(f"/runs/{run_id}/logs").status_code == 200


def test_a_stopped_run_ends_and_frees_its_gpus_within_five_seconds(installation: Installation) -> None:
    run_id = installation.submit(steps=100_000, **STEADY)
    installation.wait(lambda: installation.run(run_id)["summary"]["steps"] > 0, 90, "it trains")
    assert processes_with(f"run-{run_id}-")
    assert installation.client.post(f"/runs/{run_id}/stop").status_code == 202
    took = installation.wait(lambda: installation.run(run_id)["status"] == "stopped", 30, "stopped")
    gone = took + installation.wait(lambda: not processes_with(f"run-{run_id}-"), 30, "its driver is gone")
    assert gone < 5.0
    # The GPUs are free when the next run can have them.
    following = installation.submit(steps=3)
    assert installation.wait_for(following, "succeeded", "failed")["status"] == "succeeded"


def test_a_laptops_job_trains_its_own_task_and_ends_by_its_verdict(installation: Installation, laptop: Path) -> None:
    job = ray_job(installation, "submit", "--working-dir", str(laptop), "--", "muonscope", "run", "spec.yaml")
    printed, _ = job.communicate(timeout=120)

    assert job.returncode == 0, printed
    (run,) = installation.client.get("/runs", params={"q": "task:laptop_task:build"}).json()["runs"]
    assert run["spec"]["working_dir"].startswith("gcs://_ray_pkg_")
    assert (run["status"], run["verdict"]["name"]) == ("succeeded", "trains")
    assert run["id"] in printed
    assert "trains" in printed


@pytest.mark.faults
def test_stopping_a_laptops_job_stops_its_run(installation: Installation, laptop: Path) -> None:
    spec = json.dumps({"name": "laptop's long one", "world_size": 2, "steps": 100_000, **STEADY})
    (laptop / "long.json").write_text(spec, encoding="utf-8")
    submitted = ray_job(
        installation, "submit", "--submission-id", "laptop-long", "--working-dir", str(laptop), "--",
        "muonscope", "run", "long.json",
    )  # fmt: skip
    found = {"q": "name~long"}

    def runs() -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = installation.client.get("/runs", params=found).json()["runs"]
        return listed

    installation.wait(lambda: runs() and runs()[0]["summary"]["steps"], 120, "the laptop's run trains")
    stopping = ray_job(installation, "stop", "laptop-long")
    assert "stopped" in stopping.communicate(timeout=60)[0]
    submitted.communicate(timeout=60)

    installation.wait(lambda: runs()[0]["status"] == "stopped", 30, "the run is stopped")


@pytest.mark.acceptance
def test_the_tutorial_ends_in_the_comparison_it_promises(installation: Installation, tmp_path: Path) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    specs = re.findall(r"as `(\w+\.yaml)`.*?```yaml\n(.*?)```", text, re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert len(specs) == 2
    for name, spec in specs:
        (tmp_path / name).write_text(spec, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    done = subprocess.run(
        ["bash", "-c", commands + "muonscope show $master; muonscope show $ordered"],
        cwd=tmp_path,
        env={**installation.environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    verdicts = [line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith("verdict")]
    assert verdicts == ["poisoned", "trains"], done.stdout
    assert "step 4" in done.stdout


def test_a_clean_end_is_zero_and_leaves_no_process(installation: Installation) -> None:
    head = installation.head_id()
    assert installation.process is not None
    installation.process.send_signal(signal.SIGTERM)
    assert installation.process.wait(30) == 0, installation.log()
    assert find_processes(head) == []
