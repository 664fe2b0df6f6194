"""A service for one command: found, or started, waited for and ended."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import httpx
import pytest
import typer

from muonscope.cli import run_verbs, service_process
from muonscope.cli.screen import Screen
from muonscope.cli.service_process import service_for
from muonscope.client import ClientSettings
from muonscope.client.calls import get_health
from muonscope.errors import ServiceStartFailed, ServiceUnreachable
from service.store.leadership import LeadershipRepository
from service.store.migrate import upgrade
from service.store.session import Database
from tests.ports import hold_port, number_of
from tests.unit.client.fake_service import FakeService

UP = textwrap.dedent("""
    import os, signal, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            # As a service of its own: it knows no token, and where others would reach it is another's matter.
            named = [name for name in ("RAY_ADDRESS", "HOST", "REQUIRE_TOKEN") if "MUONSCOPE_" + name in os.environ]
            is_elsewhere = os.environ.get("MUONSCOPE_DATABASE_URL", "").endswith("record.db") and (
                "Authorization" in self.headers or named
            )
            self.send_response(401 if is_elsewhere else 200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    def end(*_):
        open(os.environ["MUONSCOPE_HOME"] + "/ended", "w").close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    open(os.environ["MUONSCOPE_HOME"] + "/pid", "w").write(str(os.getpid()))
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
""")


class Unnamed(ClientSettings):
    """Nothing named and nothing there: the machine's own service, if one runs, is not ours to use."""

    url: str = "http://127.0.0.1:9"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose `up` is a small server instead of the service."""
    script = tmp_path / "up.py"
    script.write_text(UP)
    monkeypatch.setattr(service_process, "UP", (sys.executable, str(script)))
    monkeypatch.setattr(service_process, "ClientSettings", Unnamed)
    # What a start says is counted: on a busy machine it may take long.
    monkeypatch.setattr(service_process, "_TELL_S", 600.0)
    # The usual port may be taken by another test's service between a look at it and the start.
    monkeypatch.setattr(service_process, "DEFAULT_PORT", 0)
    return Path(os.environ["MUONSCOPE_HOME"])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_a_service_one_is_started_and_ended_in_order(home: Path) -> None:
    with service_for(None, Screen(as_json=True)) as started:
        pid = int((home / "pid").read_text())
        assert started.client.readiness() == {}
        assert started.home == home
        assert is_alive(pid)

    assert (home / "ended").exists()
    assert not is_alive(pid)


def test_a_start_says_at_once_what_it_does_on_standard_error_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service_for(None, Screen()):
        said = capsys.readouterr()

    start, state, waiting, ready, dashboard = said.err.splitlines()
    assert said.out == ""
    assert start.startswith("no service answers at http://127.0.0.1:9: starting one on port ")
    assert state == f"its state is in {home}"
    assert waiting == "waiting for its Ray to start"
    assert ready.startswith("ready after ")
    assert dashboard.startswith("dashboard while it runs: http://127.0.0.1:")


def test_the_started_service_ends_also_when_the_command_fails(home: Path) -> None:
    def interrupted_command() -> None:
        with service_for(None, Screen(as_json=True)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_command()

    assert not is_alive(int((home / "pid").read_text()))


def test_a_service_that_answers_is_used_and_left_alone(service: FakeService, home: Path) -> None:
    with service_for(None, Screen(as_json=True)) as found:
        assert found.client.url == os.environ["MUONSCOPE_URL"]
        assert found.home is None

    assert not (home / "pid").exists()


def test_another_program_on_the_usual_port_is_no_hindrance(
    service: FakeService, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers["GET", "/healthz"] = httpx.Response(404, text="hello from another program")

    class TakenPort(ClientSettings):
        url: str = os.environ["MUONSCOPE_URL"]

    monkeypatch.setattr(service_process, "ClientSettings", TakenPort)
    monkeypatch.delenv("MUONSCOPE_URL")

    with service_for(None, Screen(as_json=True)) as started:
        assert started.home == home


def test_a_named_service_that_is_away_is_never_replaced_by_another(home: Path) -> None:
    with pytest.raises(ServiceUnreachable), service_for("http://127.0.0.1:9", Screen(as_json=True)):
        pass

    assert not home.exists()


def test_a_service_that_cannot_start_shows_its_last_words(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "UP", (sys.executable, "-c", "raise SystemExit('no Ray here')"))

    with (
        pytest.raises(ServiceStartFailed, match="exit code 1 before it was ready:\nno Ray here") as caught,
        service_for(None, Screen(as_json=True)),
    ):
        pass

    assert str(home / "up.log") in (caught.value.remedy or "")


def test_a_service_that_hangs_at_its_start_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "UP", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(service_process, "START_LIMIT_S", 0.3)

    with pytest.raises(ServiceStartFailed, match="not ready within"), service_for(None, Screen(as_json=True)):
        pass


STANDING_BY = textwrap.dedent("""
    import json, os, signal, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    HOME = os.environ["MUONSCOPE_HOME"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            open(HOME + "/asked", "a").write(self.path)
            leads = open(HOME + "/asked").read().count("/readyz") > int(os.environ.get("LEADS_AFTER", "1000"))
            self.send_response(200 if leads else 503)
            self.end_headers()
            detail = "no job yet; standing by: " + os.environ["LEADER"] + " leads; Ray starts"
            self.wfile.write(b"{}" if leads else json.dumps({"title": "Unavailable", "detail": detail}).encode())

        def log_message(self, *_):
            pass

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    open(HOME + "/pid", "w").write(str(os.getpid()))
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
""")


@pytest.fixture
def leader(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> str:
    """A service that answers, and that no address given to the command names."""
    url = os.environ["MUONSCOPE_URL"]
    monkeypatch.delenv("MUONSCOPE_URL")
    return url


def stand_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leader_url: str) -> None:
    script = tmp_path / "stand_by.py"
    script.write_text(STANDING_BY)
    monkeypatch.setattr(service_process, "UP", (sys.executable, str(script)))
    monkeypatch.setenv("LEADER", leader_url)


def record_leader(home: Path, url: str) -> None:
    home.mkdir(parents=True)
    database = Database(f"sqlite:///{home / 'muonscope.db'}")
    upgrade(database)
    with database.write() as session:
        controllers = LeadershipRepository(session)
        controllers.register("first", url=url, place="elsewhere|ns|1|1")
        controllers.claim("first", lease_s=3600)
    database.dispose()


def test_a_started_service_that_stands_by_is_ended_and_the_leader_is_used(
    leader: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_by(monkeypatch, tmp_path, leader)

    with service_for(None, Screen()) as found:
        assert found.client.url == leader
        assert found.home is None
        assert not is_alive(int((home / "pid").read_text()))

    assert f"a service leads on {home} already: using {leader}" in capsys.readouterr().err


def test_a_leader_that_no_longer_answers_is_waited_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_by(monkeypatch, tmp_path, "http://127.0.0.1:9")
    monkeypatch.setenv("LEADS_AFTER", "2")

    with service_for(None, Screen(as_json=True)) as started:
        assert started.home == home
        assert is_alive(int((home / "pid").read_text()))


def test_the_leader_on_record_is_used_and_none_is_started(leader: str, home: Path) -> None:
    record_leader(home, leader)

    with service_for(None, Screen(as_json=True)) as found:
        assert found.client.url == leader
        assert found.home is None

    assert not (home / "pid").exists()


def test_a_leader_on_record_that_does_not_answer_is_replaced(home: Path) -> None:
    record_leader(home, "http://127.0.0.1:9")

    with service_for(None, Screen(as_json=True)) as started:
        assert started.home == home


def test_a_taken_port_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setattr(service_process, "DEFAULT_PORT", holder.getsockname()[1])

        with service_process._free_port() as port:
            assert port != holder.getsockname()[1]


def test_two_commands_at_once_start_their_services_on_two_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with hold_port() as held:
        usual = number_of(held)
        monkeypatch.setattr(service_process, "DEFAULT_PORT", usual)

        # Neither service listens yet: each would find the usual port free.
        with service_process._free_port() as first, service_process._free_port() as second:
            assert first == usual != second
        with service_process._free_port() as later:
            assert later == usual


def test_a_task_of_ones_own_is_allowed_and_found_where_the_command_is_typed_and_a_built_in_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUONSCOPE_ALLOW_TASKS", "other:build")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")

    assert service_process._own_code("mine:build") == {
        "MUONSCOPE_ALLOW_TASKS": "other:build,mine:build", "PYTHONPATH": f"/elsewhere{os.pathsep}{tmp_path}",
    }  # fmt: skip
    assert service_process._own_code(None) == {}


def test_whatever_the_verdict_is_the_command_that_imports_the_record_is_named_and_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my record.db"

    with pytest.raises(typer.Exit), run_verbs._record_told(file, Screen()):
        raise typer.Exit(3)

    command = capsys.readouterr().err.splitlines()[-1].split("`")[1]
    assert shlex.split(command) == ["muonscope", "import", str(file)]


def test_a_service_for_one_command_takes_nothing_from_what_is_said_of_another_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TOKEN", "msc_of_another"), ("RAY_ADDRESS", "http://HEAD:8265"), ("REQUIRE_TOKEN", "true")):
        monkeypatch.setenv(f"MUONSCOPE_{name}", value)

    with service_process.standalone_service(tmp_path / "record.db", Screen(as_json=True)) as client:
        assert client.send(get_health()) == {}


def test_a_command_that_is_told_to_end_while_its_service_starts_leaves_none_behind(home: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: first")
    script = textwrap.dedent("""
        import os, pathlib, sys
        from muonscope.cli import main, service_process

        starts = "import os, pathlib, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
        service_process.UP = (sys.executable, "-c", "import sys; " + starts, sys.argv.pop(1))
        main.main()
    """)
    pid = tmp_path / "started"
    words = ["run", str(tmp_path / "spec.yaml"), "--standalone", "--record", str(tmp_path / "record.db")]
    command = subprocess.Popen([sys.executable, "-c", script, str(pid), *words], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        command.send_signal(signal.SIGTERM)

        assert command.wait(60) == 130
        assert not is_alive(int(pid.read_text()))
    finally:
        command.kill()
        command.wait()
        if pid.exists() and is_alive(int(pid.read_text())):
            os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_record_that_another_command_writes_is_an_error_that_says_so(
    leader: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_by(monkeypatch, tmp_path, leader)

    with (
        pytest.raises(ServiceStartFailed, match=f"record.db is written to already, by the service at {leader}") as held,
        service_process.standalone_service(tmp_path / "record.db", Screen(as_json=True)),
    ):
        pass

    assert "--record" in (held.value.remedy or "")


NEVER_READY = """
import os, pathlib, time
url = os.environ.get("MUONSCOPE_DATABASE_URL", "")
if url:
    pathlib.Path(url.removeprefix("sqlite:///")).touch()
pathlib.Path(os.environ["MUONSCOPE_HOME"], "begun").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("was_there", [False, True])
def test_a_start_that_takes_long_says_so_and_one_that_is_interrupted_leaves_no_empty_record(
    was_there: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.db"
    if was_there:
        record.touch()
    (tmp_path / "up.py").write_text(NEVER_READY)
    monkeypatch.setattr(service_process, "_TELL_S", 0.0)
    looked, plain = [], time.sleep

    def interrupt_in_time(seconds: float) -> None:
        looked.append(record.exists())
        # Once: what ends the service sleeps too.
        if looked.count(True) == 4:
            monkeypatch.setattr(time, "sleep", plain)
            raise KeyboardInterrupt
        plain(seconds)

    monkeypatch.setattr(time, "sleep", interrupt_in_time)

    with pytest.raises(KeyboardInterrupt), service_process.standalone_service(record, Screen()):
        raise AssertionError("it was never ready")

    said = capsys.readouterr().err
    assert "still waiting after 0 s: no service answers" in said
    assert "before it was ready: nothing was queued" in said
    assert record.exists() == was_there
