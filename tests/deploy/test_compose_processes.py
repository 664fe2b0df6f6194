"""docker-compose.yml without an engine: its commands, health checks, environments and secrets, on one machine.

Each service of the profile `cpu` is started as the file says, word by word, once what it waits for is well. In place of
images, this environment's programs; in place of a container each, one machine with a network, mounts and names of its
own, where `db`, `ray-head` and `controller` are its loopback.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.compose import ROOT, Service, services
from tests.machines import Machine, short_folder, wait_until
from tests.postgres import binaries

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]

HOSTS: Final = dict.fromkeys(("db", "ray-head", "controller"), "127.0.0.1")
SECRETS: Final = Path("/run/secrets")
STATE: Final = Path("/var/lib/muonscope")
HEALTH_LIMIT_S: Final = 240.0
SPEC: Final = {
    "name": "through the composition", "world_size": 2, "steps": 12, "precision": "fp32",
    "checkpoint": {"every_steps": 5, "keep": 1},
}  # fmt: skip


class Composition:
    """The services of one profile, as processes of one machine."""

    def __init__(self, folder: Path, machine: Machine, profile: str) -> None:
        self.folder, self.machine = folder, machine
        wanted = {
            name: service
            for name, service in services().items()
            if profile in service.raw.get("profiles", [profile])
        }  # fmt: skip
        order = TopologicalSorter({name: set(service.depends_on) for name, service in wanted.items()})
        self.services = [wanted[name] for name in order.static_order()]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        programs = binaries()
        assert programs is not None, "PostgreSQL is not installed"
        # All that an image would bring: where programs and packages lie.
        path = os.pathsep.join([str(Path(sys.executable).parent), str(programs), os.environ["PATH"]])
        self.image = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder), "TMPDIR": str(folder / "tmp"),
                      "MUONSCOPE_HOME": str(STATE), "LANG": "C.UTF-8"}  # fmt: skip

    def up(self) -> None:
        for service in self.services:
            environment = {**self.image, **service.environment}
            if service.raw["restart"] == "no":
                self.machine.call(*service.command, environment=environment)
                continue
            command, user = service.command, None
            if service.name == "db":
                command, user = self._prepare_database(service), "postgres"
            self.processes[service.name] = self.machine.start(command, environment, self._log(service), user=user)
            wait_until(
                lambda service=service: self.is_well(service), HEALTH_LIMIT_S, f"{service.name} is well",  # type: ignore[misc]
                self._log(service).read_text,
            )  # fmt: skip

    def is_well(self, service: Service) -> bool:
        process = self.processes[service.name]
        assert process.poll() is None, f"{service.name} ended:\n{self._log(service).read_text()}"
        assert service.health is not None
        try:
            self.machine.call(*service.health, environment=self.image)
        except AssertionError:
            return False
        return True

    def _log(self, service: Service) -> Path:
        return self.folder / f"{service.name}.log"

    def _prepare_database(self, service: Service) -> list[str]:
        """Do what the image's entry point does before the server is there, and return the server's command."""
        given, data = service.environment, self.folder / "postgres"
        data.mkdir()
        shutil.chown(data, "postgres")
        self.machine.call(
            "initdb", f"--pgdata={data}", f"--username={given['POSTGRES_USER']}", "--auth=scram-sha-256",
            f"--pwfile={given['POSTGRES_PASSWORD_FILE']}", "--no-sync", *shlex.split(given["POSTGRES_INITDB_ARGS"]),
            environment=self.image, user="postgres",
        )  # fmt: skip
        # Alone, before anybody may connect: single-user mode.
        subprocess.run(
            ["runuser", "-u", "postgres", "--", "postgres", "--single", "-D", str(data), "postgres"],
            input=f"CREATE DATABASE {given['POSTGRES_DB']};\n", text=True, check=True, capture_output=True, cwd="/",
            env=self.image, timeout=60,
        )  # fmt: skip
        return ["postgres", "-D", str(data), "-c", f"unix_socket_directories={data}", "-c", "fsync=off"]


@pytest.fixture
def composition() -> Iterator[Composition]:
    folder = short_folder()
    folder.chmod(0o755)
    secrets, state = folder / "secrets", folder / "state"
    subprocess.run(["sh", str(ROOT / "deploy" / "secrets.sh"), str(secrets)], check=True, capture_output=True)
    # Each file is mounted into its containers, whatever the folder's mode.
    secrets.chmod(0o755)
    for path in (state, folder / "tmp"):
        path.mkdir()
    try:
        with Machine("host", folder / "host", HOSTS) as machine:
            machine.empty(Path("/run"), STATE.parent)
            machine.call("mkdir", str(SECRETS), str(STATE))
            machine.mount(secrets, SECRETS)
            machine.mount(state, STATE)
            yield Composition(folder, machine, "cpu")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_what_the_file_starts_trains_and_its_steps_are_in_postgresql(composition: Composition) -> None:
    composition.up()
    machine, folder = composition.machine, composition.folder
    (folder / "job").mkdir()
    (folder / "job" / "spec.json").write_text(json.dumps(SPEC))
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(SECRETS / "ray_token")}

    # A laptop's way in, which is the longest: Ray's door, the jobs' token, the queue, a driver, ranks on the worker.
    said = machine.call(
        "ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", str(folder / "job"), "--",
        "muonscope", "run", "spec.json", environment={**composition.image, **ray}, timeout_s=300,
    )  # fmt: skip

    assert "succeeded" in said
    assert "trains" in said
    query = "SELECT count(*), count(DISTINCT step), max(step) FROM step"
    database = {"PGPASSWORD": (folder / "secrets" / "database_password").read_text().strip()}
    rows = machine.call(
        "psql", "--host=db", "--username=muonscope", "--dbname=muonscope", "--no-align", "--tuples-only", "-c", query,
        environment={**composition.image, **database},
    )  # fmt: skip
    assert rows.strip() == "12|12|11"
    token = (folder / "secrets" / "prometheus_token").read_text().strip()
    with machine.client(8800) as client:
        assert client.get("/metrics").status_code == 401
        metrics = client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
        # The scope read: whoever only measures starts nothing.
        refused = client.post("/runs", json=SPEC, headers={"Authorization": f"Bearer {token}"})
    assert metrics.status_code == 200
    assert refused.status_code == 403
    # A second `docker compose up` migrates again, and finds its tokens.
    for service in composition.services:
        if service.raw["restart"] == "no":
            machine.call(*service.command, environment={**composition.image, **service.environment})
    # What the ranks wrote is where the controller deletes it.
    assert [path.name for path in (folder / "state" / "checkpoints").glob("*/step-*")] == ["step-00000010"]
