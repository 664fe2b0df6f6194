"""The variables that must be set before torch is imported, and the compiler that is not."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from workers.driver import process_started_at
from workers.environment import (
    extensions_folder,
    prepare_environment,
    recorded_environment,
    use_card_of,
    user_folder,
)
from workers.fork_client import server_socket
from workers.spool import spool_directory
from workers.warm_pool import PRELOAD_MODULE, ray_start_environment

REPOSITORY = Path(__file__).resolve().parents[3]


def test_without_a_gpu_the_processor_is_chosen_and_the_compiler_off() -> None:
    environment: dict[str, str] = {}

    prepare_environment(environment, has_gpu=False)

    assert environment["DS_ACCELERATOR"] == "cpu"
    assert recorded_environment(environment)["TORCHDYNAMO_DISABLE"] == "1"


def test_with_a_gpu_the_compiler_and_the_accelerator_are_left_alone() -> None:
    environment: dict[str, str] = {}

    prepare_environment(environment, has_gpu=True)

    assert "TORCHDYNAMO_DISABLE" not in environment
    assert "DS_ACCELERATOR" not in environment


def test_ranks_meet_on_the_card_that_has_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.7"], "ib0": ["10.1.0.3", "fe80::1%ib0"]}
    found = {name: [SimpleNamespace(address=one) for one in addresses] for name, addresses in card.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)

    def chosen(address: str, **given: str) -> dict[str, str]:
        use_card_of(address, given)
        return given

    assert chosen("192.0.2.7") == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert chosen("fe80::1") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    # On one machine NCCL needs no card, and finds the quickest way itself.
    assert chosen("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert chosen("192.0.2.7", GLOO_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="ib") == {
        "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib",
    }  # fmt: skip
    assert chosen("203.0.113.9") == {}


def test_what_the_user_set_stays() -> None:
    environment = {"OMP_NUM_THREADS": "8", "TORCH_EXTENSIONS_DIR": "/mine"}

    prepare_environment(environment, has_gpu=False)

    assert (environment["OMP_NUM_THREADS"], environment["TORCH_EXTENSIONS_DIR"]) == ("8", "/mine")


def run_python(code: str, **environment: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip()


KEEPERS: list[Callable[[], Path]] = [extensions_folder, server_socket, lambda: spool_directory("run-x-a1")]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_a_node_keeps_lies_where_only_its_user_reads_and_writes(
    keeper: Callable[[], Path], temporary: Path
) -> None:
    mine = temporary / f"muonscope-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)

    assert mine in keeper().parents
    assert mine.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("keeper", KEEPERS)
def test_another_users_folder_is_refused(
    keeper: Callable[[], Path], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    (temporary / f"muonscope-{user + 1}").mkdir()

    with pytest.raises(PermissionError, match="belongs to another user or is no folder: remove it"):
        keeper()


def test_a_link_in_place_of_the_folder_is_refused(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"muonscope-{os.getuid()}").symlink_to(elsewhere)

    with pytest.raises(PermissionError, match="is no folder: remove it"):
        user_folder()


BUILDS_AN_OPTIMIZER = """
import sys, torch
from workers.environment import keep_compiler_unloaded
keep_compiler_unloaded()
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
torch.compile(lambda x: x)
print('torch._dynamo' in sys.modules)
"""


@pytest.mark.parametrize(("disable", "is_loaded"), [("1", "False"), ("0", "True")])
def test_the_compiler_is_not_imported_where_it_is_off_and_is_where_it_is_on(disable: str, is_loaded: str) -> None:
    assert run_python(BUILDS_AN_OPTIMIZER, TORCHDYNAMO_DISABLE=disable, DS_ACCELERATOR="cpu") == is_loaded


PRELOADS = """
import os, sys
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
import workers.preload
print(*[name for name in sys.modules if name.startswith("workers.")])
from workers.fork_client import lock_path, server_socket
print(server_socket().with_suffix('.log').exists(), 'torch' in sys.modules)
"""
SERVES = """
from workers.spool import is_locked
import time
deadline = time.monotonic() + 60
while not is_locked(lock_path(server_socket())) and time.monotonic() < deadline: time.sleep(0.05)
print(is_locked(lock_path(server_socket())))
import workers.train_worker
print(server_socket())
"""


@pytest.fixture(scope="module")
def idle_worker() -> list[str]:
    """What an idle worker says of itself; nobody asks its fork server for anything."""
    *said, path = run_python(PRELOADS + SERVES, DS_ACCELERATOR="cpu").splitlines()
    for process in psutil.process_iter(["cmdline"]):
        if path in (process.info["cmdline"] or []):
            process.kill()
    return said


def test_an_idle_worker_starts_the_nodes_fork_server_and_imports_nothing_heavy(idle_worker: list[str]) -> None:
    assert idle_worker[1:] == ["True False", "True"]


def test_an_idle_worker_keeps_no_module_that_an_upgrade_may_change(idle_worker: list[str]) -> None:
    assert idle_worker[0] == "workers.preload"


def test_a_jobs_supervisor_starts_none() -> None:
    said = run_python(PRELOADS, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1").splitlines()

    # Before a server is started, its log is opened.
    assert said[1] == "False False"


def test_a_warm_cluster_preloads_a_module_that_exists() -> None:
    assert ray_start_environment()["RAY_preload_python_modules"] == PRELOAD_MODULE
    assert (REPOSITORY / "workers" / "preload.py").exists()


def test_a_process_knows_when_it_began() -> None:
    began = time.time()
    said = float(run_python("from workers.driver import process_started_at; print(process_started_at())"))

    # The kernel counts the start in hundredths of a second.
    assert began - 0.1 <= said <= time.time()
    assert process_started_at() < said
