"""F1, F3, F4, F5, F6, F14, F15, F17 and F18: what runs survive. Ray, drivers, ranks and training are real.

One service and one Ray for the file, with two logical GPUs.
"""

import hashlib
import json
import os
import pickle
import signal
import sqlite3
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.controller.local_ray import find_processes
from tests.installation import ENDED, LIMIT_S, STEADY, Installation, is_gone, processes_with
from workers.environment import extensions_folder
from workers.shipper import DRAINED_LINGER_S, count_records
from workers.spool import spool_directory

FRESH_DATA = {"name": "simple_model", "fixed_batch": False}


def driver_of(run_id: str, number: int) -> psutil.Process:
    # Ray's supervisor of the job has the same words on its command line, after its own.
    (driver,) = (
        process
        for process in processes_with("workers.driver", f"run-{run_id}-a{number}")
        if "-m" in process.cmdline()[1:2]
    )
    return driver


def shipper_of(run_id: str, number: int) -> psutil.Process:
    (shipper,) = processes_with("workers.shipper", str(spool_directory(f"run-{run_id}-a{number}")))
    return shipper


def assert_its_gpus_are_free(training: Installation) -> None:
    """The next run of both GPUs starts and succeeds."""
    assert training.wait_for(training.submit(steps=3), *ENDED)["status"] == "succeeded"


def checkpoints(training: Installation, run_id: str) -> list[int]:
    events = training.client.get(f"/runs/{run_id}/events").json()["events"]
    return [event["detail"]["step"] for event in events if event["kind"] == "checkpoint"]


def test_f1_a_killed_controller_adopts_its_run_and_the_record_is_whole(training: Installation) -> None:
    run_id = training.train(steps=600)
    training.kill()
    head = training.head_id()
    # The run goes on, and may end, while nobody is there.
    assert processes_with("workers.driver", f"run-{run_id}-")
    time.sleep(2)
    training.start()

    run = training.wait_for(run_id, *ENDED)

    assert training.head_id() == head
    assert (run["status"], [attempt["number"] for attempt in run["attempts"]]) == ("succeeded", [1]), run["failure"]
    assert training.steps(run_id) == list(range(600))


def test_f3_a_killed_rank_fork_server_or_actor_ends_its_attempt_and_the_third_ends_the_run(
    training: Installation,
) -> None:
    lock = extensions_folder() / f"fault-{os.getpid()}" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    run_id = training.train()

    def rank(pids: list[int]) -> int:
        return pids[1]

    def fork_server(pids: list[int]) -> int:
        server = psutil.Process(pids[0]).parent()
        assert server is not None
        assert "workers.fork_server" in server.cmdline()
        return server.pid

    def actors() -> list[int]:
        ours = {process.pid for process in find_processes(training.head_id())}
        return [process.pid for process in processes_with("ray::TrainWorker") if process.pid in ours]

    def actor(pids: list[int]) -> int:
        # Those of the attempt before may be on their way out.
        training.wait(lambda: len(actors()) == 2, what="two actors")
        return actors()[0]

    victims: list[Callable[[list[int]], int]] = [rank, fork_server, actor]
    for number, victim in enumerate(victims, start=1):
        pids = training.wait_for_ranks(run_id, number)
        began = time.monotonic()
        os.kill(victim(pids), signal.SIGKILL)
        training.wait(lambda pids=pids: all(is_gone(pid) for pid in pids), what="no rank is left")  # type: ignore[misc]
        training.wait(lambda: training.run(run_id)["status"] != "running", what="the run is not running")
        # The promise is sixty, on a machine that does nothing else.
        assert time.monotonic() - began < 120
    run = training.wait_for(run_id, *ENDED)

    kinds = [attempt["failure"]["kind"] for attempt in run["attempts"]]
    assert (run["status"], kinds) == ("failed", ["worker_died"] * 3)
    assert run["attempts"][0]["failure"]["rank"] == 1
    # Nothing waited on the lock that a killed build had left.
    assert not lock.exists()
    lock.parent.rmdir()
    assert_its_gpus_are_free(training)


def test_f3_a_run_whose_rank_was_killed_ends_with_the_bits_of_the_uninterrupted_one(training: Installation) -> None:
    spec: dict[str, Any] = {
        "steps": 320, "task": FRESH_DATA, "loss_scale": {"initial_power": 20, "window": 50},
        "checkpoint": {"every_steps": 40, "keep": 2},
    }  # fmt: skip
    whole = training.wait_for(training.submit(**spec), *ENDED)
    run_id = training.submit(**spec)
    training.wait(lambda: len(checkpoints(training, run_id)) >= 2, what="two checkpoints are reported")
    os.kill(training.attempt(run_id)["ranks"][1]["pid"], signal.SIGKILL)
    resumed = training.wait_for(run_id, *ENDED)

    def record(run: dict[str, Any]) -> list[dict[str, Any]]:
        steps = training.client.get(f"/runs/{run['id']}/steps").json()["steps"]
        return [{key: value for key, value in step.items() if key not in ("attempt", "step_time_s")} for step in steps]

    first, second = resumed["attempts"]
    assert (first["status"], first["failure"]["kind"], first["failure"]["rank"]) == ("failed", "worker_died", 1)
    assert second["first_step"] in checkpoints(training, run_id)
    assert second["first_step"] >= 80
    assert second["declared_steps"] == 320 - second["first_step"]
    assert whole["summary"]["discarded"] > 0
    assert resumed["verdict"]["name"] == whole["verdict"]["name"] == "trains"
    assert record(resumed) == record(whole)
    assert second["final"]["final_parameters_hash"] == whole["attempts"][0]["final"]["final_parameters_hash"]
    kept = sorted(path.name for path in (training.home / "checkpoints" / run_id).iterdir())
    assert kept == ["step-00000280", "step-00000320"]


def settled(training: Installation, run_id: str) -> int:
    """How many steps are stored once no more come."""
    stored = -1
    while stored != (found := len(training.steps(run_id))):
        stored = found
        time.sleep(3)
    return stored


def test_f4_a_stopped_and_a_killed_shipper_neither_stop_training_nor_lose_a_row(training: Installation) -> None:
    run_id = training.train()
    training.wait(lambda: len(training.steps(run_id)) > 50, what="rows are stored")
    shipper = shipper_of(run_id, 1)
    shipper.suspend()
    # What it had posted is stored all the same.
    before = settled(training, run_id)
    spool = spool_directory(f"run-{run_id}-a1")
    training.wait(lambda: count_records(spool) > before + 100, what="training goes on into the spool")
    assert len(training.steps(run_id)) == before
    during = count_records(spool)
    shipper.resume()
    training.wait(lambda: len(training.steps(run_id)) >= during, what="the rows of the meantime")
    shipper.kill()
    killed_at = len(training.steps(run_id))
    training.wait(lambda: len(training.steps(run_id)) > killed_at + 100, what="another shipper carries on")
    training.stop(run_id)

    steps = training.steps(run_id)
    assert steps == list(range(len(steps)))
    attempt = training.attempt(run_id)
    assert (attempt["number"], attempt["declared_steps"]) == (1, len(steps))
    rows = training.client.get(f"/runs/{run_id}/steps", params={"limit": 1000}).json()["steps"]
    times = [row["step_time_s"] for row in rows]
    usual, stopped = statistics.median(times[:before]), statistics.median(times[before:during])
    print(f"a step took {1e3 * usual:.2f} ms, and {1e3 * stopped:.2f} ms while the shipper was stopped")
    # As much as the pace varies by itself on a machine that does much else; a rank that waited would stand still.
    assert stopped < 5 * usual


def test_f5_a_run_outlives_rays_head_and_its_logs_and_the_queue_do_too(training: Installation) -> None:
    run_id = training.train(checkpoint={"every_steps": 100})
    training.wait(lambda: checkpoints(training, run_id), what="a checkpoint is reported")
    waiting = training.submit(steps=3)
    os.kill(int(training.head()["vital"]["gcs"][0]), signal.SIGKILL)

    training.wait(lambda: training.run(run_id)["status"] != "running", what="the attempt is given up")
    lost = training.run(run_id)["attempts"][0]
    assert (lost["status"], lost["failure"]["kind"]) in {("lost", "job_lost"), ("failed", "worker_died")}
    log = training.client.get(f"/runs/{run_id}/logs", params={"attempt": 1, "rank": 0})
    training.wait_for_ranks(run_id, 2)
    assert log.status_code == 200
    assert training.attempt(run_id)["first_step"] >= 100
    training.stop(run_id)
    assert training.wait_for(waiting, *ENDED)["status"] == "succeeded"


def test_f6_a_stopped_rank_is_named_and_its_run_goes_on_in_another_attempt(training: Installation) -> None:
    run_id = training.train()
    pids = training.wait_for_ranks(run_id, 1)
    os.kill(pids[1], signal.SIGSTOP)
    training.wait_for_ranks(run_id, 2)
    training.stop(run_id)

    failure = training.run(run_id)["attempts"][0]["failure"]
    assert (failure["kind"], failure["rank"]) == ("worker_stalled", 1)
    assert is_gone(pids[1])


def test_f6_a_silent_driver_is_replaced_and_what_wakes_up_late_writes_nothing(training: Installation) -> None:
    run_id = training.train()
    training.wait(lambda: len(training.steps(run_id)) > 20, what="rows are stored")
    late = shipper_of(run_id, 1)
    late.suspend()
    driver_of(run_id, 1).suspend()

    def stored_of_the_first() -> int:
        query = "SELECT count(*) FROM step JOIN attempt ON attempt.id = step.attempt_id WHERE attempt.submission_id = ?"
        with closing(sqlite3.connect(training.home / "muonscope.db")) as store:
            return int(store.execute(query, (f"run-{run_id}-a1",)).fetchone()[0])

    training.wait_for_ranks(run_id, 2)
    before = stored_of_the_first()
    assert count_records(spool_directory(f"run-{run_id}-a1")) > before
    late.resume()
    # Where its writer has died meanwhile it leaves its spool to a driver that may still come.
    training.wait(lambda: is_gone(late.pid), DRAINED_LINGER_S + LIMIT_S, "the late shipper is refused and ends")
    training.stop(run_id)

    assert stored_of_the_first() == before
    first = training.run(run_id)["attempts"][0]
    assert (first["status"], first["failure"]["kind"]) == ("failed", "worker_stalled")
    steps = training.steps(run_id)
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize(
    ("spec", "kind", "steps"),
    [
        ({"precision": "fp16"}, "loss_scale_exhausted", 17),
        ({"precision": "bf16", "stop_after_discarded_steps": 5}, "no_progress", 5),
    ],
    ids=["by the least loss scale", "for want of progress"],
)
def test_f14_nan_in_every_step_ends_the_run_and_stays_nan(
    training: Installation, spec: dict[str, Any], kind: str, steps: int
) -> None:
    faults = [{"kind": "nan", "step": step} for step in range(30)]
    run = training.wait_for(training.submit(world_size=1, faults=faults, **spec), *ENDED)

    answer = training.client.get(f"/runs/{run['id']}/steps")
    rows = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["steps"]
    assert (run["status"], run["failure"]["kind"], len(run["attempts"])) == ("failed", kind, 1)
    assert [row["step"] for row in rows] == list(range(steps))
    assert {row["discarded"] for row in rows} == {True}
    assert {row["loss"] for row in rows} == {"NaN"}
    assert run["summary"]["momentum_finite"] is True
    assert training.client.get("/runs", params={"sort": "-last_loss"}).status_code == 200
    csv = training.client.get(f"/runs/{run['id']}/steps", params={"format": "csv"}).text
    assert csv.lower().count("nan") >= steps


def test_f15_a_rank_without_memory_is_tried_as_often_as_the_product_says(training: Installation) -> None:
    run_id = training.submit(task={"name": "tests.faults.tasks:hungry"}, world_size=1)
    run = training.wait_for(run_id, *ENDED)

    kinds = [attempt["failure"]["kind"] for attempt in run["attempts"]]
    assert (run["status"], kinds) == ("failed", ["out_of_memory"] * 3)
    assert_its_gpus_are_free(training)


def test_f17_a_run_is_cancelled_in_every_state_and_leaves_no_process(training: Installation) -> None:
    # The grace and ten seconds, and as much again as a busy machine takes to end processes.
    limit_s = 2 + 10 + 60
    running = training.train()
    queued = training.submit()
    assert training.client.post(f"/runs/{queued}/stop").json()["status"] == "stopped"
    pids = training.wait_for_ranks(running, 1)
    training.client.post(f"/runs/{running}/stop")
    training.wait_for(running, *ENDED, limit_s=limit_s)
    training.wait(lambda: all(is_gone(pid) for pid in pids), limit_s, "its ranks are gone")
    # The last rows are in.
    steps = training.steps(running)
    assert steps == list(range(training.attempt(running)["declared_steps"]))
    assert len(steps) > 0

    pending = training.submit(steps=100_000, **STEADY)
    training.wait(lambda: training.run(pending)["status"] == "pending", what="it starts")
    training.client.post(f"/runs/{pending}/stop")
    training.wait_for(pending, *ENDED, limit_s=limit_s)

    # One rank hears no signal, the other one waits for it in a collective.
    stubborn = training.submit(task={"name": "tests.faults.tasks:stubborn"})
    training.wait(lambda: len(training.run(stubborn)["attempts"]) == 1, what="its attempt")
    training.wait(lambda: len(training.attempt(stubborn)["ranks"]) == 2, what="its ranks")
    pids = [rank["pid"] for rank in training.attempt(stubborn)["ranks"]]
    training.client.post(f"/runs/{stubborn}/stop")
    training.wait_for(stubborn, *ENDED, limit_s=limit_s)
    training.wait(lambda: all(is_gone(pid) for pid in pids), limit_s, "its ranks are gone")

    # Neither driver nor ranks run.
    frozen = training.train()
    pids = training.wait_for_ranks(frozen, 1)
    for process in (*map(psutil.Process, pids), driver_of(frozen, 1)):
        process.suspend()
    training.client.post(f"/runs/{frozen}/stop")
    training.wait_for(frozen, *ENDED, limit_s=limit_s)
    training.wait(lambda: all(is_gone(pid) for pid in pids), limit_s, "its ranks are gone")

    for run_id in (running, queued, pending, stubborn, frozen):
        assert training.run(run_id)["status"] == "stopped"
        drivers = partial(processes_with, "workers.driver", f"run-{run_id}-")
        training.wait(lambda drivers=drivers: not drivers(), limit_s, "no driver is left")  # type: ignore[misc]
    assert_its_gpus_are_free(training)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def interrupted(training: Installation) -> tuple[str, list[Path]]:
    """A run with two checkpoints or more whose first attempt was killed and whose second one waits."""
    run_id = training.submit(steps=400, task=FRESH_DATA, checkpoint={"every_steps": 30, "keep": 3}, **STEADY)
    training.wait(lambda: len(checkpoints(training, run_id)) >= 2, what="two checkpoints are reported")
    training.client.post("/queue/pause")
    os.kill(training.attempt(run_id)["ranks"][0]["pid"], signal.SIGKILL)
    training.wait_for(run_id, "queued")
    folders = sorted((training.home / "checkpoints" / run_id).glob("step-*"))
    assert len(folders) >= 2
    return run_id, folders


def test_f18_a_damaged_checkpoint_is_passed_over_for_the_one_before(training: Installation) -> None:
    run_id, folders = interrupted(training)
    victim = max(folders[-1].rglob("*.pt"), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    training.client.post("/queue/resume")
    run = training.wait_for(run_id, *ENDED)

    assert run["status"] == "succeeded", run["failure"]
    assert run["attempts"][1]["first_step"] == int(folders[-2].name.removeprefix("step-"))
    assert training.steps(run_id) == list(range(400))


def test_f18_s9_where_no_checkpoint_is_whole_the_run_says_so_and_no_strange_pickle_is_loaded(
    training: Installation, tmp_path: Path
) -> None:
    run_id, folders = interrupted(training)
    planted = tmp_path / "planted"
    for folder in folders:
        # A whole checkpoint by its own manifest, written by somebody else.
        victim = max(folder.rglob("*.pt"), key=lambda path: path.stat().st_size)
        victim.write_bytes(pickle.dumps(Bomb(planted)))
        manifest = json.loads((folder / "manifest.json").read_text())
        entry = {"bytes": victim.stat().st_size, "sha256": hashlib.sha256(victim.read_bytes()).hexdigest()}
        manifest["files"][str(victim.relative_to(folder))] = entry
        (folder / "manifest.json").write_text(json.dumps(manifest))
    training.client.post("/queue/resume")
    run = training.wait_for(run_id, *ENDED)

    assert (run["status"], run["failure"]["kind"]) == ("failed", "checkpoint_unusable")
    assert "not the one that was reported" in run["failure"]["message"]
    assert not planted.exists()
    # The counter-test: whoever loads it runs it.
    pickle.loads(pickle.dumps(Bomb(planted)))
    assert planted.exists()
