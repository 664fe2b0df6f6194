"""Whole attempts as Ray jobs on a cluster of this test's own, against a controller in memory."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import AttemptStatus, FailureKind, Phase, Precision
from tests.integration.workers.local_ray import REPOSITORY, LocalRay
from tests.unit.workers.fake_controller import FakeController, running, wait_until
from workers.spool import spool_directory

START_LIMIT_S = 180.0
# For what is a matter of moments on a machine that does nothing else.
LIMIT_S = 60.0
# `make bench` holds it to two seconds, on a machine that does nothing else. A rank that did not hear would be given up
# by the stall limit, which is a minute here.
FREE_S = 30.0
# Calm enough to go on for ever.
CALM: dict[str, Any] = {"precision": "fp32", "optimizer": {"lr": 1e-5}}
ENDLESS: dict[str, Any] = {**CALM, "steps": 1_000_000}
_numbers = count(1)


@contextmanager
def attempt_of(cluster: LocalRay, spec: dict[str, Any], **controller_settings: Any) -> Iterator[FakeController]:
    """Submit one attempt of a spec; whatever is left of it is stopped at the end."""
    full = RunSpec.model_validate({"world_size": 2, "optimizer": {"lr": 0.05}, **spec})
    attempt_id = f"run-{os.getpid()}x{next(_numbers)}-a1"
    with running(spec=full, attempt_id=attempt_id, run_id=attempt_id, **controller_settings) as controller:
        submit(cluster, controller)
        yield controller
        if cluster.job_status(attempt_id) in ("PENDING", "RUNNING"):
            cluster.stop_job(attempt_id)
            cluster.wait_for_job(attempt_id)


def name_of(word: str) -> str:
    """An attempt's id that no other session on this machine uses: its spool lies where theirs do."""
    return f"run-{os.getpid()}{word}-a1"


def submit(cluster: LocalRay, controller: FakeController, env_vars: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "workers.driver", "--controller", controller.url]
    command += ["--attempt", controller.attempt_id, "--enrolment-token", controller.enrolment_token]
    cluster.submit(shlex.join(command), controller.attempt_id, env_vars)


def wait_for_steps(controller: FakeController, steps: int = 5) -> None:
    wait_until(lambda: len(controller.records) >= steps, START_LIMIT_S, "training")
    wait_until(lambda: len(controller.facts.get("ranks") or []) == 2, LIMIT_S, "the ranks' facts")


def pid_of(controller: FakeController, rank: int) -> int:
    return int(controller.facts["ranks"][rank].pid)


def parents_of_ranks(controller: FakeController) -> set[int]:
    return {psutil.Process(fact.pid).ppid() for fact in controller.facts["ranks"]}


def ranks_are_gone(controller: FakeController) -> bool:
    return not any(psutil.pid_exists(fact.pid) for fact in controller.facts["ranks"])


@pytest.fixture(scope="module")
def waiting(cluster: LocalRay) -> set[int]:
    """The worker processes that wait for the first attempt."""
    # One that still starts may be seen now and not in the next moment: what is returned is what was seen.
    seen: list[set[int]] = []

    def are_two() -> bool:
        seen.append(set(cluster.idle_workers()))
        return len(seen[-1]) >= 2

    wait_until(are_two, START_LIMIT_S, "idle workers")
    return seen[-1]


@pytest.fixture(scope="module")
def trained(cluster: LocalRay, waiting: set[int]) -> FakeController:
    """An attempt that was left to itself."""
    with attempt_of(cluster, {}) as controller:
        assert cluster.wait_for_job(controller.attempt_id) == "SUCCEEDED"
    return controller


@dataclass(frozen=True)
class Ended:
    """An attempt that would have trained for ever: who its ranks were, and how it ended when it was told to."""

    controller: FakeController
    parents: set[int]
    exit_code: int | None
    took_s: float


@pytest.fixture(scope="module")
def stopped_by_ray(cluster: LocalRay) -> Ended:
    with attempt_of(cluster, ENDLESS) as controller:
        wait_for_steps(controller)
        parents = parents_of_ranks(controller)
        started = time.monotonic()
        cluster.stop_job(controller.attempt_id)
        wait_until(lambda: ranks_are_gone(controller) and cluster.free_gpus() == 2, LIMIT_S, "free GPUs")
        assert cluster.wait_for_job(controller.attempt_id) == "STOPPED"
        took_s = time.monotonic() - started
    return Ended(controller, parents, cluster.job_exit_code(controller.attempt_id), took_s)


@pytest.fixture(scope="module")
def stopped_by_the_controller(cluster: LocalRay) -> Ended:
    with attempt_of(cluster, ENDLESS) as controller:
        wait_for_steps(controller)
        parents = parents_of_ranks(controller)
        started = time.monotonic()
        controller.stop_requested = True
        wait_until(lambda: controller.outcome is not None, LIMIT_S, "the outcome")
        took_s = time.monotonic() - started
        cluster.wait_for_job(controller.attempt_id)
    return Ended(controller, parents, cluster.job_exit_code(controller.attempt_id), took_s)


def test_ordered_trains_and_its_record_is_whole(trained: FakeController) -> None:
    controller = trained
    assert sorted(controller.records) == list(range(30))
    outcome = controller.outcome
    assert outcome is not None
    assert (outcome.status, outcome.declared_steps, outcome.failure) == (AttemptStatus.SUCCEEDED, 30, None)
    assert outcome.final is not None
    assert outcome.final.parameters_moved == outcome.final.parameters_total == 10
    assert outcome.final.final_parameters_hash != controller.facts["initial_parameters_hash"]
    assert outcome.final.peak_memory_bytes
    assert not spool_directory(controller.attempt_id).exists()


def test_an_attempts_facts_say_where_and_on_what_it_ran(trained: FakeController) -> None:
    controller, facts, phases = trained, trained.facts, trained.facts["phases"]
    own = [phase for phase in Phase if phase not in (Phase.SUBMITTED, Phase.JOB_SUBMITTED)]
    assert list(phases) == own
    assert sorted(phases.values()) == [phases[phase] for phase in own]
    assert [fact.rank for fact in facts["ranks"]] == [0, 1]
    assert [fact.local_rank for fact in facts["ranks"]] == [0, 0]
    assert len({fact.pid for fact in facts["ranks"]}) == 2
    assert [fact.name for fact in facts["parameters"]][:2] == ["linears.0.weight", "linears.0.bias"]
    assert controller.spec.precision is Precision.FP16
    assert facts["environment"]["labels"] == ["fp16 emulated on CPU"]
    assert facts["environment"]["environment_variables"]["TORCHDYNAMO_DISABLE"] == "1"
    assert facts["environment"]["versions"]["deepspeed"].startswith("0.19")
    assert facts["environment"]["deepspeed_file"].endswith("__init__.py")
    assert facts["resolved_ds_config"]["gradient_clipping"] == 0.0
    assert {sample.rank for sample in controller.load} == {0, 1}
    assert all((sample.memory_bytes or 0) > 2**27 for sample in controller.load), "torch alone takes more"


def test_c09_two_actors_are_told_two_devices_and_see_one_each(cluster: LocalRay) -> None:
    script = Path(__file__).with_name("device_ids.py")
    cluster.submit(shlex.join([sys.executable, str(script)]), "devices")

    assert cluster.wait_for_job("devices") == "SUCCEEDED", cluster.job_logs("devices")
    seen = json.loads(cluster.job_logs("devices").splitlines()[-1])
    # The cluster's GPUs are logical: their numbers are what Ray assigned, and what each process is let see.
    assert sorted(device_ids for device_ids, _ in seen) == [["0"], ["1"]]
    assert all(device_ids == [visible] for device_ids, visible in seen)


def test_master_dies_with_a_verdict_and_its_own_exit_code(cluster: LocalRay) -> None:
    with attempt_of(cluster, {"step_ordering": "master"}) as controller:
        assert cluster.wait_for_job(controller.attempt_id) == "FAILED"
        assert cluster.job_exit_code(controller.attempt_id) == 3

    assert sorted(controller.records) == list(range(17))
    outcome = controller.outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.step) == (FailureKind.LOSS_SCALE_EXHAUSTED, 17)
    assert (outcome.status, outcome.declared_steps) == (AttemptStatus.FAILED, 17)
    assert outcome.final is not None
    assert outcome.final.parameters_moved == 0


def test_actors_take_workers_that_waited_and_new_ones_take_their_place(
    cluster: LocalRay, waiting: set[int], trained: FakeController
) -> None:
    wait_until(lambda: len(cluster.idle_workers()) >= 2, START_LIMIT_S, "new idle workers")

    assert trained.outcome is not None
    assert len(waiting - set(cluster.idle_workers())) >= 2


def test_a_stopped_job_frees_its_gpus_at_once_and_says_it_was_stopped(stopped_by_ray: Ended) -> None:
    controller = stopped_by_ray.controller
    assert stopped_by_ray.took_s < FREE_S
    assert controller.outcome is not None
    assert controller.outcome.status is AttemptStatus.STOPPED
    assert controller.outcome.declared_steps == len(controller.records) >= 5
    assert sorted(controller.records) == list(range(len(controller.records)))


def test_a_heartbeats_answer_can_ask_for_the_stop(stopped_by_the_controller: Ended) -> None:
    outcome = stopped_by_the_controller.controller.outcome
    assert outcome is not None
    assert outcome.status is AttemptStatus.STOPPED
    assert stopped_by_the_controller.exit_code == 130


def test_ranks_are_copies_of_the_nodes_fork_server_and_each_is_used_once(
    stopped_by_ray: Ended, stopped_by_the_controller: Ended
) -> None:
    parents = stopped_by_ray.parents | stopped_by_the_controller.parents
    facts = [stopped_by_ray.controller.facts, stopped_by_the_controller.controller.facts]

    assert len(parents) == 1
    assert "workers.fork_server" in psutil.Process(parents.pop()).cmdline()
    assert len({rank.pid for each in facts for rank in each["ranks"]}) == 4
    # Nothing is left to import: in a process that starts from nothing it is seconds, and more where this takes more.
    phases = facts[1]["phases"]
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, deepspeed"], cwd=REPOSITORY, capture_output=True, check=True)
    assert phases[Phase.IMPORTED] - phases[Phase.WORKERS_STARTED] < (time.monotonic() - began) / 2


@pytest.mark.faults
def test_training_goes_on_while_the_controller_is_away_and_nothing_is_lost(cluster: LocalRay) -> None:
    with attempt_of(cluster, {**CALM, "steps": 400}) as controller:
        wait_for_steps(controller)
        controller.stop()
        known = len(controller.records)
        ranks = [psutil.Process(fact.pid) for fact in controller.facts["ranks"]]
        wait_until(lambda: not any(rank.is_running() for rank in ranks), START_LIMIT_S, "the end of training")
        assert len(controller.records) == known < 400

        controller.start()

        assert cluster.wait_for_job(controller.attempt_id) == "SUCCEEDED"
    assert sorted(controller.records) == list(range(400))
    assert controller.outcome is not None
    assert controller.outcome.declared_steps == 400


@pytest.mark.faults
def test_a_killed_shipper_is_replaced_and_nothing_is_lost(cluster: LocalRay) -> None:
    with attempt_of(cluster, {**CALM, "steps": 120}) as controller:
        wait_for_steps(controller)
        directory = str(spool_directory(controller.attempt_id))
        shippers = [
            process for process in psutil.process_iter(["cmdline"]) if directory in (process.info["cmdline"] or [])
        ]
        assert len(shippers) == 1
        shippers[0].send_signal(signal.SIGKILL)

        assert cluster.wait_for_job(controller.attempt_id) == "SUCCEEDED"
    assert sorted(controller.records) == list(range(120))


@pytest.mark.faults
def test_a_killed_rank_is_named_and_the_other_does_not_hang(cluster: LocalRay) -> None:
    with attempt_of(cluster, ENDLESS) as controller:
        wait_for_steps(controller)
        os.kill(pid_of(controller, 1), signal.SIGKILL)
        assert cluster.wait_for_job(controller.attempt_id) == "FAILED"
        assert cluster.job_exit_code(controller.attempt_id) == 1

    outcome = controller.outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.rank) == (FailureKind.WORKER_DIED, 1)
    assert "killed by SIGKILL" in outcome.failure.message
    assert outcome.declared_steps == len(controller.records)


@pytest.mark.faults
def test_a_stopped_rank_is_named_when_the_group_stalls(cluster: LocalRay) -> None:
    # A rank is silent after three seconds: several heartbeats are left to say so before the stall ends the attempt.
    with attempt_of(cluster, ENDLESS, stall_limit_s=9.0) as controller:
        wait_for_steps(controller)
        os.kill(pid_of(controller, 1), signal.SIGSTOP)
        assert cluster.wait_for_job(controller.attempt_id) == "FAILED"
        wait_until(lambda: ranks_are_gone(controller), LIMIT_S, "the stopped rank's end")

    outcome = controller.outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.rank) == (FailureKind.WORKER_STALLED, 1)
    assert controller.heartbeats[-1].silent_ranks == [1]


@pytest.mark.faults
def test_a_rank_dies_with_its_actor(cluster: LocalRay) -> None:
    with attempt_of(cluster, ENDLESS) as controller:
        wait_for_steps(controller)
        # Those of an attempt that has just ended may be on their way out.
        wait_until(lambda: len(cluster.workers("ray::TrainWorker")) == 2, LIMIT_S, "two actors")
        os.kill(cluster.workers("ray::TrainWorker")[0], signal.SIGKILL)
        wait_until(lambda: ranks_are_gone(controller), LIMIT_S, "the ranks' end")
        assert cluster.wait_for_job(controller.attempt_id) == "FAILED"

    outcome = controller.outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.WORKER_DIED


@pytest.mark.faults
def test_c08_two_attempts_at_once_meet_on_ports_of_their_own_and_not_on_the_usual_one(cluster: LocalRay) -> None:
    halves = {**ENDLESS, "resources": {"gpus_per_rank": 0.5}}
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Whoever else holds it serves as well.
        with suppress(OSError):
            usual.bind(("127.0.0.1", 29500))
            usual.listen()
        with attempt_of(cluster, halves) as one, attempt_of(cluster, halves) as other:
            for controller in (one, other):
                wait_for_steps(controller)
            ports = [listening(pid_of(controller, 0)) for controller in (one, other)]
            before = [len(controller.records) for controller in (one, other)]
            wait_until(
                lambda: all(len(c.records) > b for c, b in zip((one, other), before, strict=True)),
                LIMIT_S,
                "both go on",
            )

    assert ports[0]
    assert ports[1]
    assert not ports[0] & ports[1]
    assert 29500 not in ports[0] | ports[1]


def listening(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_the_last_rows_of_ranks_that_died_on_another_node_are_not_lost(cluster_of_two_nodes: LocalRay) -> None:
    with attempt_of(cluster_of_two_nodes, ENDLESS) as controller:
        wait_for_steps(controller)
        os.kill(pid_of(controller, 0), signal.SIGKILL)
        assert cluster_of_two_nodes.wait_for_job(controller.attempt_id) == "FAILED"

    assert controller.outcome is not None
    assert controller.outcome.failure is not None
    assert controller.outcome.failure.kind is FailureKind.WORKER_DIED
    assert controller.outcome.declared_steps == len(controller.records) > 0
    assert sorted(controller.records) == list(range(len(controller.records)))


def test_a_superseded_attempt_ends_at_once_and_reports_nothing(cluster: LocalRay) -> None:
    with attempt_of(cluster, ENDLESS) as controller:
        wait_for_steps(controller)
        known = controller.supersede()
        assert cluster.wait_for_job(controller.attempt_id) == "FAILED"
        wait_until(lambda: ranks_are_gone(controller), LIMIT_S, "the ranks' end")

    assert controller.outcome is None
    assert len(controller.records) == known


def test_a_token_that_was_used_before_starts_nothing(cluster: LocalRay) -> None:
    with running(attempt_id=name_of("used")) as controller:
        controller.enrolments = 1
        submit(cluster, controller)
        assert cluster.wait_for_job(name_of("used")) == "FAILED"

    assert controller.records == {}
    assert controller.heartbeats == []


USER_TASK = """
import torch
from workers.tasks import TaskContext

class Line:
    def __init__(self, context):
        self.model = torch.nn.Linear(context.options["width"], 1)
        self.context = context

    def batch(self, step, micro_batch):
        generator = torch.Generator().manual_seed(step)
        return (torch.randn(self.context.micro_batch_size, self.context.options["width"], generator=generator),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

def line(context: TaskContext):
    print(f"built for rank {context.rank}")
    return Line(context)
"""


def test_a_users_own_task_is_imported_inside_the_job(cluster: LocalRay, tmp_path: Path) -> None:
    (tmp_path / "my_line.py").write_text(USER_TASK)
    spec = RunSpec.model_validate(
        {"task": {"name": "my_line:line", "options": {"width": 3}}, "precision": "fp32", "steps": 4, "world_size": 2}
    )
    with running(spec=spec, attempt_id=name_of("user"), run_id="user") as controller:
        submit(cluster, controller, {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})
        assert cluster.wait_for_job(name_of("user")) == "SUCCEEDED", cluster.job_logs(name_of("user"))

    assert sorted(controller.records) == [0, 1, 2, 3]
    # What each rank prints is its own log, and all of it the driver's and the job's.
    for rank, other in ((0, 1), (1, 0)):
        assert f"built for rank {rank}" in controller.logs[rank]
        assert f"built for rank {other}" not in controller.logs[rank]
    for text in (controller.logs[None], cluster.job_logs(name_of("user"))):
        assert "[rank 0] built for rank 0" in text
        assert "[rank 1] built for rank 1" in text


def test_a_task_that_cannot_be_imported_fails_with_its_name(cluster: LocalRay) -> None:
    spec = RunSpec.model_validate({"task": {"name": "nowhere.at_all:task"}})
    with running(spec=spec, attempt_id=name_of("nowhere")) as controller:
        submit(cluster, controller)
        assert cluster.wait_for_job(name_of("nowhere")) == "FAILED"

    assert controller.outcome is not None
    assert controller.outcome.failure is not None
    assert controller.outcome.failure.kind is FailureKind.TASK_ERROR
    assert "nowhere.at_all:task" in controller.outcome.failure.message


def test_neither_driver_nor_shipper_imports_torch() -> None:
    code = "import sys, workers.attempt, workers.driver, workers.shipper; print('torch' in sys.modules)"

    said = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "False"
