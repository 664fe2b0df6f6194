"""The fork server and its client, as real processes and without Ray."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from muonscope.contract.run_spec import RunSpec
from workers import fork_client
from workers.environment import prepare_environment
from workers.fork_client import RAYLET_VARIABLE, RankProcess, Surroundings, fork_rank, process_birth, server_socket
from workers.fork_server import LEFTOVER_AGE_S, sweep, take_lock
from workers.rank import Assignment
from workers.spool import Destination

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder below which no socket's name fits into what the kernel takes."""
    folder = tmp_path_factory.mktemp("deep") / ("x" * 150)
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def raylet(deep: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What the server takes for its Ray node, so that it ends with these tests. Its files lie in the deep folder."""
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(SLEEPER) as process:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv(RAYLET_VARIABLE, str(process.pid))
        patch.setattr("tempfile.gettempdir", lambda: str(deep))
        prepare_environment()
        yield process
        process.kill()


@pytest.fixture
def rank(raylet: subprocess.Popen[bytes]) -> Iterator[RankProcess]:
    process = fork_rank()
    yield process
    process.close()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return process_birth(pid) == ""


def start(process: RankProcess, tmp_path: Path) -> None:
    """Have the process be rank 1 of 2, which then waits for the meeting."""
    spec = RunSpec.model_validate({"task": {"name": "simple_model"}, "world_size": 2, "steps": 1})
    destination = Destination("http://127.0.0.1:9", "run-x-a1", "token", 1)
    process.running.send(Surroundings.here("127.0.0.1", []))
    process.running.send_bytes(pickle.dumps(Assignment(spec, 1, destination, 0, tmp_path, {}, tmp_path / "rank-1.log")))
    assert process.running.recv() == 0


def test_a_rank_is_a_copy_of_the_server_with_all_imports_done(rank: RankProcess) -> None:
    server = psutil.Process(psutil.Process(rank.pid).ppid())

    assert str(server_socket()) in server.cmdline()
    assert any("libtorch_cpu" in region.path for region in psutil.Process(rank.pid).memory_maps())


def test_a_rank_answers_polls_while_it_waits_for_the_others(rank: RankProcess, tmp_path: Path) -> None:
    start(rank, tmp_path)
    rank.polling.send_bytes(b"poll")

    assert pickle.loads(rank.polling.recv_bytes()).steps_done == 0


def test_one_server_serves_all_who_would_import_the_same(rank: RankProcess) -> None:
    other = fork_rank()
    try:
        assert other.pid != rank.pid
        assert psutil.Process(other.pid).ppid() == psutil.Process(rank.pid).ppid()
    finally:
        other.close()


def test_a_rank_dies_when_its_client_hangs_up_even_if_it_does_not_run(raylet: object) -> None:
    process = fork_rank()
    os.kill(process.pid, signal.SIGSTOP)

    process._server.close()

    wait_for(lambda: is_gone(process.pid), "the rank's end")
    process.close()


def test_a_rank_whose_actor_is_gone_ends_by_itself(rank: RankProcess, tmp_path: Path) -> None:
    start(rank, tmp_path)
    rank.polling.close()

    wait_for(lambda: is_gone(rank.pid), "the rank's end")


def test_the_client_hears_how_a_rank_ended(rank: RankProcess) -> None:
    os.kill(rank.pid, signal.SIGKILL)

    assert rank.wait(60) == "its process was killed by SIGKILL"


def test_a_signal_without_a_name_is_told_by_its_number(rank: RankProcess) -> None:
    os.kill(rank.pid, signal.SIGRTMIN + 1)

    assert rank.wait(60) == f"its process was killed by signal {signal.SIGRTMIN + 1}"


def test_a_rank_that_lives_has_no_end_to_tell(rank: RankProcess) -> None:
    assert "unknown" in rank.wait(0.05)


@pytest.mark.parametrize("change", ["PYTORCH_ANYTHING", "OMP_NUM_THREADS", RAYLET_VARIABLE])
def test_what_changes_the_imports_asks_for_another_server(
    change: str, raylet: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server_socket()

    monkeypatch.setenv(change, str(os.getpid()))

    assert server_socket() != before


@pytest.mark.parametrize("change", ["RANK", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"])
def test_what_is_a_ranks_own_does_not(change: str, raylet: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server_socket()

    monkeypatch.setenv(change, "1")

    assert server_socket() == before


def test_a_changed_source_file_asks_for_another_server_even_by_an_older_file(
    raylet: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    os.utime(tmp_path / "__init__.py", (2e9, 2e9))
    source = tmp_path / "module.py"
    source.write_text("new")
    monkeypatch.setattr(fork_client, "_OWN_PACKAGES", ("ours",))
    origin = fork_client._origin
    monkeypatch.setattr(
        fork_client, "_origin", lambda name: tmp_path / "__init__.py" if name == "ours" else origin(name)
    )
    before = server_socket()

    assert server_socket() == before
    source.write_text("old")
    os.utime(source, (1.0, 1.0))

    assert server_socket() != before


def test_a_server_is_reached_however_deep_its_folder_lies(rank: RankProcess, deep: Path) -> None:
    assert len(str(server_socket())) > 107
    assert deep in server_socket().parents
    assert str(server_socket()) in psutil.Process(psutil.Process(rank.pid).ppid()).cmdline()


def test_a_variable_of_other_than_utf_8_bytes_names_a_server(raylet: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server_socket()

    monkeypatch.setenv("LD_LIBRARY_PATH", os.fsdecode(b"/opt/\xff"))

    assert server_socket() != before


def test_a_server_that_does_not_answer_is_named_with_the_remedy(
    rank: RankProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = psutil.Process(rank.pid).ppid()
    os.kill(server, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(fork_client, "ANSWER_LIMIT_S", 0.3)
            with pytest.raises(RuntimeError, match=f"process {server}, did not answer within 0.3 s.*kill it"):
                fork_rank()
    finally:
        os.kill(server, signal.SIGCONT)

    # What was asked for in vain is gone, and the next request is served.
    fork_rank().close()


def test_a_server_that_cannot_start_is_reported_with_its_last_words(
    raylet: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "START_LIMIT_S", 0.3)
    monkeypatch.setattr(fork_client, "_import_folders", lambda: [str(tmp_path)])
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken here')")
    (tmp_path / "workers").symlink_to(Path(fork_client.__file__).parent)
    monkeypatch.setenv("PYTHONUNBUFFERED", "yes")

    with pytest.raises(RuntimeError, match="no fork server within"):
        fork_rank()

    log = server_socket().with_suffix(".log")
    wait_for(lambda: "torch is broken here" in log.read_text(), "the reason")


def test_ranks_that_ended_are_waited_for_and_stay_no_zombies(rank: RankProcess) -> None:
    server = psutil.Process(psutil.Process(rank.pid).ppid())
    others = [fork_rank() for _ in range(3)]
    for other in others:
        os.kill(other.pid, signal.SIGKILL)
        assert "SIGKILL" in other.wait(60)
        other.close()

    # Those of earlier tests, hung up on a moment ago, may still be on their way out.
    wait_for(lambda: [child.pid for child in server.children()] == [rank.pid], "the end of all the others")


def test_files_of_ended_servers_are_swept_and_those_of_living_and_late_ones_kept(tmp_path: Path) -> None:
    living = take_lock(tmp_path / "living.sock")
    assert living is not None
    for name in ("ended", "late"):
        descriptor = take_lock(tmp_path / f"{name}.sock")
        assert descriptor is not None
        os.close(descriptor)
    for name in ("living", "ended", "late"):
        (tmp_path / f"{name}.log").write_text("its words")
        age_s = 60 if name == "late" else 2 * LEFTOVER_AGE_S
        for file in tmp_path.glob(f"{name}.*"):
            os.utime(file, (time.time() - age_s,) * 2)

    sweep(tmp_path)

    assert {file.name for file in tmp_path.iterdir()} == {"living.lock", "living.log", "late.lock", "late.log"}
    assert take_lock(tmp_path / "living.sock") is None
    os.close(living)


FORKING = """
import os, socket, sys, time, types
from pathlib import Path
sys.modules["workers.rank"] = types.SimpleNamespace(serve=lambda *_: print("serves", flush=True))
from workers import fork_server
server = fork_server.ForkServer(Path(sys.argv[1]), None, "")
fork_server._lock = os.open(os.devnull, os.O_RDONLY)
client, _ = socket.socketpair()
if os.fork() == 0:
    while sys.argv[2] == "dies" and os.getppid() == server._pid:
        time.sleep(0.001)
    server._become_rank(client, [os.dup(0), os.dup(0), os.dup(1), os.dup(2)])
if sys.argv[2] == "dies":
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(("fate", "said"), [("lives", "serves\n"), ("dies", "")])
def test_a_rank_whose_server_died_as_it_forked_ends_before_it_serves(fate: str, said: str, tmp_path: Path) -> None:
    # Until all who could print are gone, the output stays open.
    command = [sys.executable, "-c", FORKING, str(tmp_path / "a.sock"), fate]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)

    assert (printed.stdout, printed.stderr) == (said, "")


def test_ranks_die_with_a_killed_server_and_the_next_server_ends_with_its_ray_node(
    raylet: subprocess.Popen[bytes],
) -> None:
    # The last test here: it ends what the others share.
    first = fork_rank()
    killed = psutil.Process(first.pid).ppid()
    os.kill(killed, signal.SIGKILL)

    wait_for(lambda: is_gone(first.pid), "the rank's end")
    assert first.wait(60) == "its process is gone, and so is the fork server that knew why"
    second = fork_rank()
    server, path = psutil.Process(second.pid).ppid(), server_socket()
    assert server != killed
    raylet.kill()

    wait_for(lambda: is_gone(second.pid) and is_gone(server), "their end")
    assert not path.exists()
    first.close()
    second.close()
