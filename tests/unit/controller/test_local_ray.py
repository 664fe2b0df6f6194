"""What of the local Ray can be decided without one."""

import asyncio
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from service.app import create_app
from service.controller.leadership import is_gone, this_place
from service.controller.local_ray import (
    HEAD_ID_VARIABLE,
    Head,
    LocalRay,
    end_head,
    end_left_head,
    find_processes,
    free_ports,
    make_private,
    remove_ended_sessions,
    session_folder,
    temporary_folder,
)
from service.controller.process_birth import birth_of
from service.controller.worker_environment import WARM_POOL, count_real_gpus, worker_environment
from service.settings import Settings
from workers.warm_pool import ray_start_environment

# Looked for among all processes of the machine: of this one alone.
HEAD, OTHER_HEAD = (f"test-head-{uuid.uuid4().hex}" for _ in range(2))
SOCKET_NAME = "/session_2026-11-29_16-30-04_016005_4194304/sockets/plasma_store"


def test_a_short_home_keeps_rays_sessions_inside() -> None:
    assert session_folder(Path("/home/ada/.muonscope/ray")) == Path("/home/ada/.muonscope/ray/sessions")


def test_a_long_home_moves_rays_sessions_where_their_sockets_fit() -> None:
    deep = Path("/home/ada") / ("projects/" * 12) / "ray"
    folder = session_folder(deep)
    assert len(str(folder) + SOCKET_NAME) <= 107
    assert session_folder(deep) == folder
    assert session_folder(deep.parent / "other") != folder


def test_a_long_home_and_a_long_temporary_folder_leave_rays_sockets_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch/" + "x" * 100)
    folder = session_folder(Path("/home/ada") / ("projects/" * 12) / "ray")
    assert len(str(folder) + SOCKET_NAME) <= 107


@pytest.mark.parametrize(("folder", "expected"), [("/scratch/ada", "/scratch/ada"), ("/" + "x" * 80, "/tmp")])
def test_rays_processes_make_their_sockets_where_the_path_fits(
    folder: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: folder)
    assert temporary_folder() == expected


def test_rays_sessions_lie_behind_a_folder_that_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "ms"
    folder.mkdir()
    folder.chmod(0o777)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    # Ray opens the folder it is given: never the outermost of ours.
    assert session_folder(Path("/home/ada") / ("projects/" * 12) / "ray").parent.name.startswith("ms")


def make_sessions(folder: Path, count: int) -> list[Path]:
    sessions = [folder / f"session_2026-11-29_16-30-0{number}_016005_4{number}" for number in range(count)]
    for session in sessions:
        (session / "logs").mkdir(parents=True)
    return sessions


def test_of_the_sessions_that_have_ended_the_newest_stays_and_so_does_all_that_is_no_session(tmp_path: Path) -> None:
    *old, newest = make_sessions(tmp_path, 4)
    (tmp_path / "session_of_mine").mkdir()
    (tmp_path / "session_latest").symlink_to(newest)

    remove_ended_sessions(tmp_path, keep=1)

    assert {path.name for path in tmp_path.iterdir()} == {newest.name, "session_of_mine", "session_latest"}
    assert not any(session.exists() for session in old)


def test_a_session_that_still_has_a_process_stays(tmp_path: Path) -> None:
    alive, ended = make_sessions(tmp_path, 2)
    raylet = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", f"--session_dir={alive}"], stdin=subprocess.DEVNULL
    )
    try:
        remove_ended_sessions(tmp_path, keep=0)
    finally:
        raylet.kill()
        raylet.wait()

    assert alive.exists()
    assert not ended.exists()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_head_that_is_ended_leaves_one_session_and_one_that_goes_on_all(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("service.controller.local_ray.end_head", lambda _: None)
    monkeypatch.setattr("service.controller.local_ray.session_folder", lambda folder: folder / "sessions")
    monkeypatch.setattr(Head, "is_alive", lambda _: is_kept)
    sessions = make_sessions(tmp_path / "ray" / "sessions", 3)
    local = LocalRay(Settings(home=tmp_path))
    (tmp_path / "ray" / "head.json").write_text(json.dumps(dataclasses.asdict(Head("x", "http://127.0.0.1:1", 2))))

    async def start_and_stop() -> None:
        local.start(on_ready=lambda: None, keep_running=lambda: is_kept)
        await local.stop(keep_running=is_kept)

    asyncio.run(start_and_stop())

    assert [session.exists() for session in sessions] == [is_kept, is_kept, True]
    # Whoever sees something go on has to learn how to come back to it, and how to end it.
    assert [
        word in caplog.text for word in (f"`MUONSCOPE_HOME={tmp_path} muonscope up` takes", "muonscope stop RUN")
    ] == [is_kept, is_kept]


def test_a_session_outside_of_the_home_is_removed_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "ms1-abc" / "ray"
    monkeypatch.setattr("service.controller.local_ray.session_folder", lambda _: outside)
    make_sessions(outside, 1)

    LocalRay(Settings(home=tmp_path / "home"))._remove_sessions()

    assert not outside.parent.exists()
    assert tmp_path.exists()


def test_another_users_session_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    with pytest.raises(RuntimeError, match="belongs to another user; set MUONSCOPE_HOME"):
        make_private(tmp_path)


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


def test_a_head_without_its_processes_is_dead() -> None:
    born = psutil.Process().create_time()
    alive = {role: [float(os.getpid()), born] for role in ("gcs", "raylet", "dashboard")}
    assert Head("x", "http://127.0.0.1:1", 2, alive).is_alive()
    assert not Head("x", "http://127.0.0.1:1", 2, {}).is_alive()
    # The same pid born at another time is another process.
    reused = {**alive, "gcs": [float(os.getpid()), born - 1000]}
    assert not Head("x", "http://127.0.0.1:1", 2, reused).is_alive()


def test_a_clock_that_is_set_ends_neither_the_head_nor_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    place = this_place()
    alive = [float(os.getpid()), birth_of(psutil.Process())]
    head = Head("x", "http://127.0.0.1:1", 2, dict.fromkeys(("gcs", "raylet", "dashboard"), alive))
    earlier = psutil.boot_time()
    # The system reckons the moment of its start from the clock as it is now.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: earlier + 30.0)

    assert head.is_alive()
    assert not is_gone(place)
    # Counter-test: a process that began at another time is another one.
    alive[1] += 30.0
    assert not head.is_alive()


def test_ending_a_head_takes_its_descendants_and_nobody_else() -> None:
    sleep = "import time; time.sleep(600)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleep}'], env={{}}); {sleep}"
    ours = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, HEAD_ID_VARIABLE: HEAD})
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, HEAD_ID_VARIABLE: OTHER_HEAD}
    )
    try:
        deadline = time.monotonic() + 60
        while len(find_processes(HEAD)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(find_processes(HEAD)) == 2
        end_head(HEAD)
        assert not psutil.pid_exists(ours.pid)
        assert find_processes(HEAD) == []
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_a_head_that_was_left_behind_is_found_by_its_home_and_ended(tmp_path: Path) -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, HEAD_ID_VARIABLE: HEAD}
    )
    end_left_head(tmp_path)
    assert left.poll() is None, "no head is named"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "head.json").write_text(json.dumps({"id": HEAD, "address": "", "gpus": 1}))

    end_left_head(tmp_path)

    assert not psutil.pid_exists(left.pid)
    left.wait()


@pytest.mark.parametrize("has_led", [False, True])
def test_who_never_led_leaves_the_leaders_head_alone(
    has_led: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr("service.controller.local_ray.end_head", ended.append)
    local = LocalRay(Settings(home=tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "head.json").write_text(json.dumps(dataclasses.asdict(Head("x", "http://127.0.0.1:1", 2))))

    async def stand_by_and_stop() -> None:
        if has_led:
            # Ended before it has found the head that the file names: that one is its own to end.
            local.start(on_ready=lambda: None, keep_running=lambda: False)
        await local.stop(keep_running=False)

    asyncio.run(stand_by_and_stop())

    assert ended == (["x"] if has_led else [])
    assert (tmp_path / "ray" / "head.json").exists() is not has_led


def test_the_heads_environment_has_no_setting_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUONSCOPE_DATABASE_URL", "postgresql://user:secret@host/db")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    environment = LocalRay(Settings(home=tmp_path))._environment(Head("id", "http://127.0.0.1:1", 2))
    assert "secret" not in str(environment)
    assert "RAY_ADDRESS" not in environment
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).parents[3])


def test_rays_token_is_made_once_and_readable_by_us_alone(tmp_path: Path) -> None:
    local = LocalRay(Settings(home=tmp_path))
    token = local._make_token()
    assert local._make_token() == token
    assert (tmp_path / "ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_an_empty_file_that_a_full_disk_has_left_is_no_token(tmp_path: Path) -> None:
    local = LocalRay(Settings(home=tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "auth_token").touch()
    token = local._make_token()
    assert len(token) > 20
    assert local._make_token() == token
    assert (tmp_path / "ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_processors_get_one_thread_a_rank_and_gpus_do_not() -> None:
    assert worker_environment(has_gpus=False)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in worker_environment(has_gpus=True)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_visible_devices_say_how_many_gpus_there_are(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_real_gpus() == count


def test_the_local_ray_keeps_the_warm_pool_that_the_workers_describe() -> None:
    assert ray_start_environment() == WARM_POOL


@pytest.mark.parametrize("real", [0, 2])
def test_gpus_of_a_machine_without_any_are_logical_to_who_asks_for_the_cluster(
    real: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.controller.local_ray.count_real_gpus", lambda: real)

    app = create_app(Settings(home=tmp_path, gpus=3))

    assert app.state.controller.cluster()["gpus_are_logical"] is (real == 0)
