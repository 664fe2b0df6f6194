"""The doctor: each illness made, found and named with its remedy; a healthy machine is left in peace."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import httpx
import pytest

from muonscope.cli import doctor
from muonscope.cli.doctor import (
    Level,
    check_build_locks,
    check_clock,
    check_disk,
    check_gpus,
    check_packages,
    check_ray,
    check_schema,
    check_service,
    examine,
)
from service.settings import Settings
from service.store.migrate import upgrade
from service.store.session import Database
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import FakeService, problem


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def address() -> str:
    return os.environ["MUONSCOPE_URL"]


def test_a_ready_service_is_well(service: FakeService) -> None:
    assert check_service(address()).level is Level.OK


def test_a_service_that_cannot_take_runs_says_why(service: FakeService) -> None:
    service.answers["GET", "/readyz"] = problem(503, "away", detail="Ray does not answer", remedy="start Ray")

    finding = check_service(address())

    assert finding.level is Level.FAIL
    assert "Ray does not answer" in finding.found
    assert finding.remedy == "start Ray"


def test_a_free_port_is_told_from_one_held_by_another_program(service: FakeService) -> None:
    service.answers["GET", "/healthz"] = httpx.Response(200, text="hello from another program")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = f"http://127.0.0.1:{probe.getsockname()[1]}"

    assert check_service(free).level is Level.NOTE
    assert "another program" in check_service(address()).found


def test_a_port_whose_holder_does_not_speak_http_is_found() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        finding = doctor._unanswered(url)

    assert finding.level is Level.FAIL
    assert "--port" in finding.remedy


def test_clocks_that_differ_are_found(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    agreeing = check_clock(address()).level
    an_hour_ahead = time.time() + 3600
    monkeypatch.setattr(doctor, "time", SimpleNamespace(time=lambda: an_hour_ahead))

    assert agreeing is Level.OK
    assert "differ by 3" in check_clock(address()).found


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        (httpx.Response(200, json={"ray_version": "2.60.0"}), Level.OK),
        (httpx.Response(401, text="no token"), Level.OK),
        (httpx.Response(404, text="who?"), Level.FAIL),
    ],
)
def test_a_named_ray_is_asked(answer: httpx.Response, level: Level, service: FakeService) -> None:
    service.answers["GET", "/api/version"] = answer

    assert check_ray(address()).level is level


def test_no_named_ray_is_fine_and_a_named_one_that_is_away_is_not() -> None:
    assert check_ray(None).level is Level.OK
    assert check_ray("http://127.0.0.1:9").level is Level.FAIL


def test_the_packages_here_are_the_wanted_ones() -> None:
    assert check_packages().level is Level.OK


def test_another_deepspeed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "deepspeed": "0.16.0", "ray": "2.60.0"}
    monkeypatch.setattr(doctor.importlib.metadata, "version", versions.__getitem__)

    finding = check_packages()

    assert finding.level is Level.FAIL
    assert "deepspeed 0.16.0" in finding.found


@pytest.mark.parametrize(
    ("names", "torch_version", "level"),
    [
        ([], "2.13.0+cpu", Level.NOTE),
        (["NVIDIA H200"], "2.13.0+cpu", Level.FAIL),
        (["NVIDIA H200", "NVIDIA H200"], "2.13.0", Level.OK),
    ],
)
def test_gpus_need_a_torch_that_can_use_them(
    names: list[str], torch_version: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_gpu_names", lambda: names)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda _: torch_version)

    assert check_gpus().level is level


@pytest.mark.parametrize(("free", "level"), [(10**6, Level.FAIL), (10**9, Level.WARN), (10**12, Level.OK)])
def test_a_full_disk_is_found_also_where_the_folder_is_still_to_be_made(
    free: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**13, 0, free))

    assert check_disk([tmp_path / "not" / "there"]).level is level


def lock(folder: Path, age_s: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "build.ninja").touch()
    path = folder / "lock"
    path.touch()
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_the_lock_of_a_killed_build_is_found_and_named(tmp_path: Path) -> None:
    stale = lock(tmp_path / "py311_cpu" / "shm_comm", age_s=3600)

    finding = check_build_locks([tmp_path, tmp_path / "missing"])

    assert finding.level is Level.FAIL
    assert finding.remedy == f"rm {stale}"


def test_a_build_under_way_and_a_lock_that_is_not_torchs_are_left_alone(tmp_path: Path) -> None:
    lock(tmp_path / "building", age_s=5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").touch()
    os.utime(tmp_path / "other" / "lock", (0, 0))

    assert check_build_locks([tmp_path]).level is Level.OK


def test_the_schema_is_read_and_nothing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "muonscope.db"

    assert check_schema(f"sqlite:///{path}").level is Level.OK
    assert not path.parent.exists()


def test_an_old_schema_is_told_from_the_newest(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'muonscope.db'}"
    database = Database(url)
    upgrade(database)
    newest = check_schema(url)
    with database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = 'older'")
    database.dispose()
    older = check_schema(url)

    assert newest.level is Level.OK
    assert older.level is Level.WARN
    assert "muonscope db upgrade" in older.remedy


def test_a_check_that_breaks_is_itself_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(doctor, "check_gpus", broken)

    findings = {finding.check: finding for finding in examine(Settings(), "http://127.0.0.1:9")}

    assert len(findings) == 8
    assert "the disk is on fire" in findings["gpu"].found


def test_the_verb_ends_with_one_when_something_keeps_runs_from_training(
    command: RunCommand, service: FakeService
) -> None:
    well = command("doctor", "--json")
    service.answers["GET", "/readyz"] = problem(503, "away", detail="Ray does not answer", remedy="start Ray")
    ill = command("doctor")

    assert {row["check"] for row in json.loads(well.out)} >= {"service", "disk", "schema"}
    assert ill.code == 1
    assert "Ray does not answer" in ill.out
    assert "→ start Ray" in ill.out


def test_db_upgrade_makes_the_schema_and_says_from_where(command: RunCommand) -> None:
    first, second = command("db", "upgrade", "--json"), command("db", "upgrade")

    assert json.loads(first.out)["before"] is None
    assert second.code == 0
    assert second.out.startswith("the schema is at ")


def test_db_upgrade_refuses_a_newer_schema(command: RunCommand, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'newer.db'}"
    command("db", "upgrade", "--database-url", url)
    database = Database(url)
    with database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = 'ffff'")
    database.dispose()

    result = command("db", "upgrade", "--database-url", url)

    assert result.code == 1
    assert "start the newer Muonscope" in result.err
