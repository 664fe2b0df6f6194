"""The translation between our Launcher protocol and Ray's REST API, over an injected transport."""

import asyncio
import dataclasses
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from service.controller.launcher import Job, JobRefused, JobRequest, JobStatus, LauncherUnavailable
from service.controller.ray_launcher import RayLauncher, entrypoint, read_token
from service.controller.token_files import TokenFiles
from workers.driver import _parse, take_token

T = TypeVar("T")
Handler = Callable[[httpx.Request], httpx.Response]
REQUEST = JobRequest("run-abc-a1", "store-1", "http://127.0.0.1:8800", "a secret; $(touch /tmp/x)")


def launcher(handler: Handler, **options: Any) -> RayLauncher:
    values: dict[str, Any] = {"token": lambda: "ray-token", "python": "/usr/bin/python3", **options}
    return RayLauncher(lambda: "http://ray:8265/", transport=httpx.MockTransport(handler), **values)


def call(one: RayLauncher, work: Callable[[RayLauncher], Any]) -> Any:
    async def run() -> Any:
        try:
            return await work(one)
        finally:
            await one.close()

    return asyncio.run(run())


def test_a_job_is_submitted_with_its_id_owner_and_nothing_secret_in_its_environment() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"submission_id": "run-abc-a1"})

    call(launcher(answer, environment={"OMP_NUM_THREADS": "1"}), lambda one: one.submit(REQUEST))
    body = json.loads(seen[0].content)
    assert seen[0].headers["authorization"] == "Bearer ray-token"
    assert body["submission_id"] == "run-abc-a1"
    assert body["metadata"] == {"muonscope_store": "store-1"}
    assert body["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "1"}}


def test_a_job_without_variables_has_no_runtime_environment() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    call(launcher(answer), lambda one: one.submit(REQUEST))
    assert "runtime_env" not in json.loads(seen[0].content)


def test_a_job_with_code_of_its_own_runs_in_that_package() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    request = dataclasses.replace(REQUEST, working_dir="gcs://_ray_pkg_0123456789abcdef.zip")
    call(launcher(answer), lambda one: one.submit(request))
    assert json.loads(seen[0].content)["runtime_env"] == {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}


def test_the_command_line_is_words_and_never_shell() -> None:
    words = shlex.split(entrypoint("/opt/my python/bin/python", REQUEST))
    assert words == [
        "exec", "/opt/my python/bin/python", "-m", "workers.driver",
        "--controller", "http://127.0.0.1:8800", "--attempt", "run-abc-a1",
        "--enrolment-token=a secret; $(touch /tmp/x)",
    ]  # fmt: skip


def test_a_token_that_looks_like_an_option_reaches_the_driver_whole() -> None:
    request = dataclasses.replace(REQUEST, enrolment_token="-h--attempt")
    words = shlex.split(entrypoint("python", request))

    assert _parse(words[words.index("workers.driver") + 1 :]).enrolment_token == "-h--attempt"


def test_on_this_machine_the_token_is_in_a_file_of_its_owners_and_on_no_command_line(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    call(launcher(answer, token_files=TokenFiles(tmp_path / "enrolment")), lambda one: one.submit(REQUEST))
    file = tmp_path / "enrolment" / "run-abc-a1"
    words = shlex.split(json.loads(seen[0].content)["entrypoint"])
    assert "a secret" not in seen[0].content.decode()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    arguments = _parse(words[words.index("workers.driver") + 1 :])
    assert take_token(arguments.enrolment_file) == REQUEST.enrolment_token
    assert not file.exists()


def test_token_files_that_no_driver_came_for_go_and_no_link_is_followed(tmp_path: Path) -> None:
    files = TokenFiles(tmp_path / "enrolment")
    files.write("run-old-a1", "old")
    os.utime(tmp_path / "enrolment" / "run-old-a1", (0, 0))
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / "enrolment" / "run-new-a1").symlink_to(tmp_path / "outside")

    assert files.write("run-new-a1", "new").read_text() == "new"
    assert {path.name for path in (tmp_path / "enrolment").iterdir()} == {"run-new-a1"}
    assert (tmp_path / "outside").read_text() == "untouched"


def test_a_job_that_exists_already_counts_as_submitted() -> None:
    text = "ValueError: Job with submission_id run-abc-a1 already exists."
    call(launcher(lambda _: httpx.Response(400, text=text)), lambda one: one.submit(REQUEST))


def test_a_refused_job_carries_rays_words() -> None:
    with pytest.raises(JobRefused, match="bad entrypoint"):
        call(launcher(lambda _: httpx.Response(400, text="bad entrypoint")), lambda one: one.submit(REQUEST))


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_cluster_that_cannot_answer_is_unavailable_and_refuses_nothing(status: int) -> None:
    with pytest.raises(LauncherUnavailable):
        call(launcher(lambda _: httpx.Response(status)), lambda one: one.submit(REQUEST))


def test_a_broken_connection_is_unavailable() -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(LauncherUnavailable, match="does not answer"):
        call(launcher(fail), lambda one: one.jobs(["run-abc-a1"]))


def test_a_token_that_cannot_be_read_now_is_unavailable(tmp_path: Path) -> None:
    one = launcher(lambda _: httpx.Response(200, json=[]), token=lambda: read_token(tmp_path / "being replaced"))
    with pytest.raises(LauncherUnavailable, match="being replaced"):
        call(one, lambda one: one.active_jobs())


@pytest.mark.parametrize("ask", ["jobs", "resources", "logs"])
@pytest.mark.parametrize(("status", "body"), [(429, {"error": "slow down"}), (200, []), (200, None)])
def test_what_something_before_ray_says_is_no_word_of_rays(ask: str, status: int, body: Any) -> None:
    asked: dict[str, Callable[[RayLauncher], Any]] = {
        "jobs": lambda one: one.jobs(["run-abc-a1"]),
        "resources": lambda one: one.resources(),
        "logs": lambda one: one.logs("run-abc-a1"),
    }
    with pytest.raises(LauncherUnavailable):
        call(launcher(lambda _: httpx.Response(status, json=body)), asked[ask])


def test_no_address_yet_is_unavailable() -> None:
    starting = RayLauncher(lambda: None)
    with pytest.raises(LauncherUnavailable, match="starting"):
        call(starting, lambda one: one.resources())


def test_an_answer_that_is_not_json_is_unavailable() -> None:
    with pytest.raises(LauncherUnavailable, match="not JSON"):
        call(launcher(lambda _: httpx.Response(200, text="<html>")), lambda one: one.active_jobs())


def test_jobs_come_back_in_our_words_and_unknown_ones_not_at_all() -> None:
    row = {
        "submission_id": "run-abc-a1", "status": "FAILED", "message": "exit 1", "driver_exit_code": 1,
        "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR", "metadata": {"muonscope_store": "s"},
    }  # fmt: skip

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=row) if request.url.path.endswith("a1") else httpx.Response(404)

    found = call(launcher(answer), lambda one: one.jobs(["run-abc-a1", "run-abc-a2"]))
    assert found == {
        "run-abc-a1": Job("run-abc-a1", JobStatus.FAILED, "s", "exit 1", "JOB_ENTRYPOINT_COMMAND_ERROR", 1)
    }


def test_active_jobs_are_those_of_our_form_that_have_not_ended() -> None:
    rows = [
        {"submission_id": "run-abc-a1", "status": "RUNNING", "metadata": None},
        {"submission_id": "run-abc-a2", "status": "STOPPED"},
        {"submission_id": "raysubmit_x", "status": "RUNNING"},
        {"submission_id": None, "status": "RUNNING"},
    ]
    found = call(launcher(lambda _: httpx.Response(200, json=rows)), lambda one: one.active_jobs())
    assert list(found) == ["run-abc-a1"]


def test_resources_are_those_of_living_nodes_with_what_is_used() -> None:
    nodes = {
        "data": {"result": {"result": [
            {"node_id": "aa", "node_ip": "10.0.0.1", "state": "ALIVE",
             "resources_total": {"GPU": 8.0, "CPU": 16.0, "memory": 1e9}},
            {"node_id": "bb", "node_ip": "10.0.0.2", "state": "DEAD", "resources_total": {"GPU": 8.0}},
            {"node_id": "cc", "node_ip": "10.0.0.3", "state": "ALIVE", "resources_total": {"CPU": 4.0}},
        ]}}
    }  # fmt: skip
    status = {"data": {"clusterStatus": {"loadMetricsReport": {"usageByNode": {"aa": {"GPU": [3.0, 8.0]}}}}}}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=nodes if request.url.path == "/api/v0/nodes" else status)

    found = call(launcher(answer), lambda one: one.resources())
    assert (found.gpus, found.gpus_used) == (8.0, 3.0)
    assert [node.id for node in found.nodes] == ["aa", "cc"]


def test_a_cluster_that_says_nothing_of_its_use_is_taken_as_unused() -> None:
    found = call(launcher(lambda _: httpx.Response(200, json={"data": None})), lambda one: one.resources())
    assert (found.gpus, found.gpus_used) == (0.0, 0.0)


@pytest.mark.parametrize("status", [200, 404])
def test_stopping_what_runs_or_is_gone_is_fine(status: int) -> None:
    call(launcher(lambda _: httpx.Response(status, json={})), lambda one: one.stop("run-abc-a1"))


def test_logs_of_an_unknown_job_are_none() -> None:
    assert call(launcher(lambda _: httpx.Response(404)), lambda one: one.logs("run-abc-a1")) is None


def test_logs_show_everything_but_the_enrolment_token() -> None:
    request = dataclasses.replace(REQUEST, enrolment_token="s3cret")
    printed = f"Running entrypoint for job run-abc-a1: {entrypoint('python', request)}\nstep 0\n"

    shown = call(launcher(lambda _: httpx.Response(200, json={"logs": printed})), lambda one: one.logs("run-abc-a1"))

    assert "s3cret" in printed
    assert shown == printed.replace("s3cret", "<hidden>")


def test_a_failed_jobs_message_carries_no_enrolment_token() -> None:
    printed = f"exit code 2, last logs: {entrypoint('python', dataclasses.replace(REQUEST, enrolment_token='s3cret'))}"
    row = {"submission_id": "run-abc-a1", "status": "FAILED", "message": printed}

    jobs = call(launcher(lambda _: httpx.Response(200, json=row)), lambda one: one.jobs(["run-abc-a1"]))

    assert jobs["run-abc-a1"].message == printed.replace("s3cret", "<hidden>")


def test_preparing_wakes_the_heads_agent() -> None:
    seen: list[str] = []
    summary = [
        {"ip": "10.0.0.1", "raylet": {"isHeadNode": True, "dashboardAgentListenPort": 5000}},
        {"ip": "10.0.0.2", "raylet": {"isHeadNode": False, "dashboardAgentListenPort": 5001}},
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200, json={"data": {"summary": summary}})

    call(launcher(answer), lambda one: one.prepare())
    assert [url for url in seen if "job_agent" in url] == ["http://10.0.0.1:5000/api/job_agent/jobs/warm-up/logs"]


def _ended(number: int, *, owner: str = "store-1", status: str = "SUCCEEDED") -> dict[str, Any]:
    metadata = {"muonscope_store": owner}
    return {"submission_id": f"run-abc-a{number}", "status": status, "end_time": number, "metadata": metadata}


def test_old_ended_jobs_of_ours_are_pruned_and_no_others() -> None:
    rows = [_ended(number) for number in range(1, 8)]
    rows += [_ended(8, owner="store-2"), _ended(9, status="RUNNING"), {"submission_id": "somebody-elses"}]
    deleted: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            deleted.append(request.url.path)
            return httpx.Response(200, json=True)
        return httpx.Response(200, json=rows)

    pruned = call(launcher(answer), lambda one: one.prune("store-1", keep=3, spare=["run-abc-a2"]))

    assert deleted == [f"/api/jobs/run-abc-a{number}" for number in (4, 3, 1)]
    assert pruned == 3


def test_many_jobs_are_read_as_one_list() -> None:
    wanted = [f"run-abc-a{number}" for number in range(1, 41)]
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(200, json=[_ended(number) for number in range(1, 60)])

    found = call(launcher(answer), lambda one: one.jobs(wanted))

    assert seen == ["/api/jobs/"]
    assert set(found) == set(wanted)
