"""The doctor: each illness made, found and named with its remedy; a healthy machine is left in peace."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import httpx
import pytest

from muonscope.cli import doctor
from muonscope.cli.doctor import (
    check_build_locks,
    check_clock,
    check_disk,
    check_packages,
    check_port,
    check_ray,
    check_schema,
    check_service,
    examine,
)
from muonscope.cli.findings import Level
from service.settings import Settings
from service.store.migrate import upgrade
from service.store.session import Database
from tests.unit.cli.conftest import RunCommand
from tests.unit.client.fake_service import FakeService, problem
from workers.environment import prepare_environment


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
        # Held while it is looked at, so that nobody else comes to listen there; nobody does listen.
        free = check_service(f"http://127.0.0.1:{probe.getsockname()[1]}")

    assert free.level is Level.NOTE
    assert "another program" in check_service(address()).found


def test_a_port_whose_holder_does_not_speak_http_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        finding = check_service(url)

    assert finding.level is Level.FAIL
    assert "--port" in finding.remedy


def test_a_port_that_up_would_take_is_held_by_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        held = check_port("127.0.0.1", port, is_up=False)
        # Where a service is up, nobody wants the port.
        served = check_port("127.0.0.1", port, is_up=True)
    free = check_port("127.0.0.1", port, is_up=False)

    assert [found.level for found in (held, served, free)] == [Level.FAIL, Level.OK, Level.OK]
    assert str(port) in held.found
    assert "--port" in held.remedy


def test_clocks_that_differ_are_found(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    agreeing = check_clock(address()).level
    an_hour_ahead = time.time() + 3600
    monkeypatch.setattr(doctor, "time", SimpleNamespace(time=lambda: an_hour_ahead))

    assert agreeing is Level.OK
    assert "differ by 3" in check_clock(address()).found


RAY = {"ray_version": "2.60.0"}


@pytest.mark.parametrize(
    ("answer", "level", "found"),
    [
        (httpx.Response(200, json=RAY), Level.WARN, "without a token"),
        (httpx.Response(200, json={"ray_version": "2.58.1"}), Level.FAIL, "Ray 2.58.1, not 2.60.*"),
        (httpx.Response(200, text="hello from another program"), Level.FAIL, "Ray of no known version"),
        (httpx.Response(401, text="no token"), Level.FAIL, "asks for a token, and none is named"),
        (httpx.Response(404, text="who?"), Level.FAIL, "answers 404"),
    ],
)
def test_a_named_ray_is_asked(answer: httpx.Response, level: Level, found: str, service: FakeService) -> None:
    service.answers["GET", "/api/version"] = answer

    finding = check_ray(address())

    assert finding.level is level
    assert found in finding.found
    assert finding.remedy


@pytest.mark.parametrize(
    ("held", "level", "found"),
    [("s3cret", Level.OK, "takes the token"), ("wrong", Level.FAIL, "refuses"), (None, Level.FAIL, "cannot be read")],
)
def test_rays_token_is_tried(held: str | None, level: Level, found: str, service: FakeService, tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if "Authorization" not in request.headers:
            return httpx.Response(401)
        return httpx.Response(200 if request.headers["Authorization"] == "Bearer s3cret" else 403, json=RAY)

    service.answers["GET", "/api/version"] = answer
    file = tmp_path / "token"
    if held is not None:
        file.write_text(f"{held}\n")

    finding = check_ray(address(), file)

    assert finding.level is level
    assert found in finding.found
    assert str(file) in finding.found
    assert "s3cret" not in finding.found


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


@pytest.mark.parametrize(("free", "level"), [(10**6, Level.FAIL), (10**9, Level.WARN), (10**12, Level.OK)])
def test_a_full_disk_is_found_also_where_the_folder_is_still_to_be_made(
    free: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**13, 0, free))

    assert check_disk([tmp_path / "not" / "there"]).level is level


def lock(folder: Path, age_s: float) -> Path:
    folder.mkdir(parents=True)
    path = folder / "lock"
    path.touch()
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_the_lock_of_a_killed_build_is_found_and_its_removal_can_be_typed(tmp_path: Path) -> None:
    stale = lock(tmp_path / "a folder" / "py311_cpu" / "shm_comm", age_s=3600)

    finding = check_build_locks([tmp_path, tmp_path / "missing"])
    advice, _, command = finding.remedy.partition("then: ")
    subprocess.run(["bash", "-c", command], check=True)

    assert finding.level is Level.FAIL
    assert finding.found.startswith("shm_comm: its builder is gone")
    # A waiter takes a removed lock for a finished build, and fails to import what was never built.
    assert "end the scripts that wait" in advice
    assert not stale.exists()
    assert check_build_locks([tmp_path]).level is Level.OK


def test_a_build_under_way_is_left_alone_however_old_its_lock_is(tmp_path: Path) -> None:
    # As torch takes a lock: its file stays open while the build lasts.
    with lock(tmp_path / "fused_adam", age_s=3600).open() as _:
        finding = check_build_locks([tmp_path])

    assert finding.level is Level.NOTE
    assert f"fused_adam is being built by pid {os.getpid()} (" in finding.found
    assert check_build_locks([tmp_path]).level is Level.FAIL


def test_a_compiler_that_outlives_its_script_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "fused_adam"
    lock(folder, age_s=60)
    with subprocess.Popen(["cat"], cwd=folder, stdin=subprocess.PIPE) as compiler:
        finding = check_build_locks([tmp_path])

    assert finding.level is Level.NOTE
    assert f"pid {compiler.pid} (cat), whose script is gone" in finding.found


def test_locks_are_looked_for_where_ranks_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "named"))
    before = doctor.extension_folders()
    made_by_looking = list(tmp_path.iterdir())
    environment: dict[str, str] = {}
    prepare_environment(environment)

    assert made_by_looking == []
    assert tmp_path / "named" in before
    assert any(Path(environment["TORCH_EXTENSIONS_DIR"]).is_relative_to(folder) for folder in before)


def test_the_schema_is_read_and_nothing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "muonscope.db"

    assert check_schema(f"sqlite:///{path}").level is Level.OK
    assert not path.parent.exists()


def test_an_old_schema_is_told_from_the_newest_and_from_a_newer_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'muonscope.db'}"
    database = Database(url)
    upgrade(database, "0001")
    older = check_schema(url)
    upgrade(database)
    newest = check_schema(url)
    with database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = 'ffff'")
    database.dispose()
    newer = check_schema(url)

    assert [found.level for found in (older, newest, newer)] == [Level.WARN, Level.OK, Level.FAIL]
    assert "at 0001, which is old" in older.found
    assert "muonscope db upgrade" in older.remedy
    assert "start the newer Muonscope" in newer.remedy


def test_a_database_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("this was never a database")

    damaged = check_schema(f"sqlite:///{tmp_path / 'notes.db'}")
    away = check_schema("postgresql://nobody@127.0.0.1:9/none")

    assert damaged.level is away.level is Level.FAIL
    assert "file is not a database" in damaged.found
    assert "Connection refused" in away.found
    assert damaged.remedy
    assert "\n" not in away.found


def test_a_check_that_breaks_is_itself_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(doctor, "check_gpus", broken)

    findings = {finding.check: finding for finding in examine(Settings(), "http://127.0.0.1:9")}

    assert len(findings) == 10
    assert "the disk is on fire" in findings["gpu"].found


def test_the_verb_ends_with_one_when_something_keeps_runs_from_training(
    command: RunCommand, service: FakeService
) -> None:
    well = command("doctor", "--json")
    service.answers["GET", "/readyz"] = problem(503, "away", detail="Ray does not answer", remedy="start Ray")
    ill = command("doctor")

    rows = {row["check"]: row for row in json.loads(well.out)}
    assert rows.keys() >= {"service", "disk", "schema"}
    # Nothing in this shell's home speaks of the service that answers.
    assert rows["state"]["level"] == "note"
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
