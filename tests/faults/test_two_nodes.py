"""F19. Two Ray nodes and the service on machines of their own: what a run does over a network, and when a node is lost.

The machines are namespaces of this one (`tests.machines`): each has its address on one switch, its processes, and its
own `/tmp` and shared memory; the workers' home is a folder that all of them share. One rank fits on a node.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.installation import ENDED, REPOSITORY, STEADY, stored_steps
from tests.machines import Machine, refusal, short_folder, wait_until

DESK, HEAD, NODE = "10.77.0.1", "10.77.0.11", "10.77.0.12"
LIMIT_S: Final = 240.0
# Ray takes half a minute and more by itself to call a silent node dead.
QUICK_RAY: Final = {
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "4",
}  # fmt: skip
SERVICE: Final = {
    "host": "0.0.0.0", "port": 8800, "advertise_url": f"http://{DESK}:8800", "ray_address": f"http://{HEAD}:8265",
    "retry_backoff_s": 0.5, "heartbeat_s": 2, "lease_s": 10, "stall_limit_s": 60,
}  # fmt: skip


class Site:
    """The desk with the service, the node with Ray's head, and a node that comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shared = folder, folder / "shared"
        self.token_file = folder / "ray_token"
        self.token_file.write_text("a secret of this site's Ray")
        for path in (self.shared, folder / "tmp"):
            path.mkdir()
        self.machines: list[Machine] = []
        self.desk = self._machine("desk")
        self.desk.become_switch(DESK)
        self.head = self._machine("head")
        self.head.plug_into(self.desk, HEAD)
        self.client = self.desk.client(8800)

    def start(self) -> None:
        """Start Ray on both nodes and the service on the desk; returns when a run could start."""
        self._start_ray(self.head, HEAD, "--head", "--port=6379", "--dashboard-host=0.0.0.0", "--dashboard-port=8265")
        self.add_node()
        own = {f"MUONSCOPE_{name.upper()}": str(value) for name, value in SERVICE.items()}
        own |= {"MUONSCOPE_HOME": str(self.desk.folder / "home"), "MUONSCOPE_WORKERS_HOME": str(self.shared),
                "MUONSCOPE_RAY_TOKEN_FILE": str(self.token_file)}  # fmt: skip
        muonscope = [sys.executable, "-m", "muonscope.cli.main"]
        token = ["token", "create", "--name", "test", "--scope", "admin"]
        said = self.desk.call(*muonscope, *token, environment={**self._environment(), **own})
        self.client.headers["Authorization"] = f"Bearer {said.strip()}"
        self.desk.start([*muonscope, "up"], {**self._environment(), **own}, self.folder / "up.log")
        wait_until(self._has_two_gpus, LIMIT_S, "the service sees both nodes", self.logs)

    def add_node(self) -> Machine:
        """Bring a second node up, under the address that an earlier one had."""
        self.node = self._machine("node")
        self.node.plug_into(self.desk, NODE)
        self._start_ray(self.node, NODE, f"--address={HEAD}:6379")
        return self.node

    def close(self) -> None:
        self.client.close()
        for machine in reversed(self.machines):
            machine.close()

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.folder.glob("*.log")
        )

    # -- its runs ----------------------------------------------------------------------------------------------------

    def submit(self, **spec: Any) -> str:
        response = self.client.post("/runs", json={"world_size": 2, **STEADY, **spec})
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.client.get(f"/runs/{run_id}").json()
        return run

    def wait(self, run_id: str, *statuses: str) -> dict[str, Any]:
        wait_until(
            lambda: self.run(run_id)["status"] in statuses, LIMIT_S, f"the run is {statuses}",
            lambda: f"{json.dumps(self.run(run_id))}\n{self.logs()}",
        )  # fmt: skip
        return self.run(run_id)

    def checkpoints(self, run_id: str) -> list[int]:
        events = self.client.get(f"/runs/{run_id}/events").json()["events"]
        return [event["detail"]["step"] for event in events if event["kind"] == "checkpoint"]

    def steps(self, run_id: str) -> list[int]:
        return stored_steps(self.client, run_id)

    # -- its machines ------------------------------------------------------------------------------------------------

    def _machine(self, name: str) -> Machine:
        number = len(self.machines)
        machine = Machine(name, self.folder / f"{number}-{name}")
        self.machines.append(machine)
        (machine.folder / "tmp").mkdir()
        # The same name everywhere, as /tmp has, and another disk behind it.
        machine.mount(machine.folder / "tmp", self.folder / "tmp")
        machine.empty(Path("/dev/shm"))
        return machine

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "HOME": str(self.folder),
            "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.folder / "tmp"), "LANG": "C.UTF-8",
        }  # fmt: skip

    def _start_ray(self, machine: Machine, address: str, *options: str) -> None:
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file), **QUICK_RAY,
               "RAY_enable_metrics_collection": "false", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
               "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
        machine.start(
            ["ray", "start", "--block", f"--node-ip-address={address}", "--num-gpus=1", "--num-cpus=2",
             "--object-store-memory=80000000", "--disable-usage-stats", *options],
            {**self._environment(), **ray}, self.folder / f"ray-{machine.folder.name}.log",
        )  # fmt: skip
        if "--head" in options:
            wait_until(lambda: _answers(machine), LIMIT_S, "Ray's head answers", self.logs)

    def _has_two_gpus(self) -> bool:
        try:
            if self.client.get("/readyz").status_code != 200:
                return False
            nodes = self.client.get("/cluster").json()["nodes"]
        except httpx.TransportError:
            return False
        return sum(float(node["gpus"]) for node in nodes) == 2.0


def _answers(head: Machine) -> bool:
    look = "import urllib.request as u; u.urlopen('http://127.0.0.1:8265/api/gcs_healthz', timeout=4)"
    try:
        head.call(sys.executable, "-c", look)
    except AssertionError:
        return False
    return True


@pytest.fixture
def site() -> Iterator[Site]:
    if (reason := refusal()) is not None:
        pytest.skip(reason)
    folder = short_folder()
    one = Site(folder)
    try:
        one.start()
        yield one
    finally:
        one.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_f19_a_run_on_two_nodes_outlives_the_loss_of_one_and_its_record_has_no_gap(site: Site) -> None:
    steps = 900
    run_id = site.submit(steps=steps, task={"name": "simple_model", "fixed_batch": False},
                         checkpoint={"every_steps": 50, "keep": 2})  # fmt: skip
    wait_until(lambda: len(site.checkpoints(run_id)) >= 2, LIMIT_S, "two checkpoints are reported", site.logs)
    first = site.run(run_id)["attempts"][0]
    on_the_node = {rank["node"]: rank["rank"] for rank in first["ranks"]}

    # One rank on each; what they exchanged, and the rows, came over the cables.
    assert set(on_the_node) == {"head", "node"}
    # Checkpoints and rows are told of on ways of their own.
    wait_until(lambda: site.steps(run_id)[:100] == list(range(100)), LIMIT_S, "their rows are stored", site.logs)
    assert site.node.bytes_received() > 100 * 10_000

    site.node.lose_power()
    run = site.wait(run_id, "queued")
    lost = run["attempts"][0]
    assert (lost["status"], lost["failure"]["kind"]) == ("failed", "worker_died"), json.dumps(lost["failure"])
    # It waits, and says for what.
    wait_until(lambda: site.run(run_id)["waiting_reason"] is not None, LIMIT_S, "the reason is shown", site.logs)
    wait_until(
        lambda: "the cluster has 1" in (site.run(run_id)["waiting_reason"] or ""), LIMIT_S,
        f"it says that a GPU is missing: {site.run(run_id)['waiting_reason']}", site.logs,
    )  # fmt: skip

    site.add_node()
    run = site.wait(run_id, *ENDED)

    assert run["status"] == "succeeded", run["failure"]
    second = run["attempts"][1]
    assert len(run["attempts"]) == 2
    assert second["first_step"] in site.checkpoints(run_id)
    assert {rank["node"] for rank in second["ranks"]} == {"head", "node"}
    assert site.steps(run_id) == list(range(steps))
    assert run["verdict"]["name"] == "trains"
