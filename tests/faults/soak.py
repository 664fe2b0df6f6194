"""The soak: short runs on the CPU while controller, ranks, shippers, fork servers, drivers and Ray's head are killed.

    python -m tests.faults.soak --seconds 900 --runs 60 --seed 7 --report report.json

The service, Ray and training are real. After the time given nothing is killed any more, every run is waited for, and
then these must hold; the exit code is 1 where one does not:

    acknowledged = stored      every id that a client was given is a run, and there are no others
    every run is terminal      and has succeeded, unless its attempts were used up by the killing
    rows are unique and whole  steps 0 to the last, each once, for every run; each attempt's from its first one on
    no process is left         of any run while the service lives, nor of the service and its Ray after its end
    resources are back         Ray says that no GPU is used, and no run holds one
"""

import argparse
import json
import platform
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from service.controller.local_ray import find_processes
from tests.installation import ENDED, STEADY, Installation, is_gone, processes_with

# How often each is killed, in proportion.
WEIGHTS: Final = {"rank": 5, "controller": 3, "shipper": 3, "fork server": 1, "driver": 2, "Ray head": 1}
PAUSE_S: Final = (2.0, 8.0)
# A new head takes this long to be there and to have started something; killed sooner, only starts would be tested.
HEAD_PAUSE_S: Final = 60.0
SETTLE_LIMIT_S: Final = 400.0
MAX_ATTEMPTS: Final = 20
SETTINGS: Final = {"heartbeat_s": 1, "lease_s": 10, "retry_backoff_s": 0.5, "max_attempts": MAX_ATTEMPTS}


@dataclass
class Report:
    """What was done and what came of it."""

    command: str
    seed: int
    began: str
    seconds: float
    versions: dict[str, str]
    machine: str
    kills: dict[str, int] = field(default_factory=dict)
    acknowledged: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    attempts_ended_as: dict[str, int] = field(default_factory=dict)
    resumed_from_checkpoints: int = 0
    steps_stored: int = 0
    settled_after_s: float = 0.0
    broken: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


class Soak:
    def __init__(self, installation: Installation, seconds: float, runs: int, seed: int) -> None:
        self.one, self.seconds, self.runs = installation, seconds, runs
        self.chance = random.Random(seed)
        self.acknowledged: dict[str, str] = {}
        self.kills: Counter[str] = Counter()
        self.heads: set[str] = set()
        self._over = threading.Event()
        self._head_killed_at = float("-inf")

    # -- the users ---------------------------------------------------------------------------------------------------

    def submit_all(self) -> None:
        """Submit the runs, spread over the time; each is asked for until it is acknowledged."""
        chance = random.Random(self.chance.random())
        with httpx.Client(base_url=self.one.url, timeout=60, trust_env=False) as client:
            for number in range(self.runs):
                spec = {
                    **STEADY,
                    "precision": chance.choice(("fp16", "bf16", "fp32")),
                    "name": f"soak {number}",
                    "world_size": chance.choice((1, 1, 2)),
                    "steps": chance.randrange(50, 400),
                    "checkpoint": {"every_steps": 50 if number % 2 else None},
                    "zero_stage": chance.choice((1, 2, 3)),
                }
                self._submit(client, f"soak-{number}", spec)
                self._over.wait(chance.uniform(0, 1.6) * self.seconds / self.runs)

    def _submit(self, client: httpx.Client, key: str, spec: dict[str, Any]) -> None:
        while True:
            with suppress(httpx.TransportError):
                answer = client.post("/runs", json=spec, headers={"Idempotency-Key": key})
                if answer.status_code in (200, 201):
                    self.acknowledged[key] = answer.json()["id"]
                    return
                assert answer.status_code == 503, answer.text
            time.sleep(0.2)

    # -- the faults --------------------------------------------------------------------------------------------------

    def torment(self) -> None:
        """Kill something now and then until the time is over."""
        victims: dict[str, Callable[[], bool]] = {
            "rank": lambda: self._kill_one(self._ranks()),
            "controller": self._kill_controller,
            "shipper": lambda: self._kill_one(self._ours("workers.shipper")),
            "fork server": lambda: self._kill_one(self._fork_servers()),
            "driver": lambda: self._kill_one(self._ours("workers.driver")),
            "Ray head": self._kill_head,
        }
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            time.sleep(self.chance.uniform(*PAUSE_S))
            name = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            if victims[name]():
                self.kills[name] += 1
                print(f"{self.seconds - (until - time.monotonic()):6.0f} s  {name} killed", flush=True)
        self._over.set()

    def _ours(self, module: str) -> list[psutil.Process]:
        ids = list(self.acknowledged.values())
        return [
            process
            for process in processes_with(module, "run-")
            if any(f"run-{uid}-" in " ".join(_command(process)) for uid in ids)
        ]

    def _fork_servers(self) -> list[psutil.Process]:
        found = find_processes(self.one.head_id())
        return [process for process in found if "workers.fork_server" in _command(process)]

    def _ranks(self) -> list[psutil.Process]:
        ranks = []
        for server in self._fork_servers():
            with suppress(psutil.Error):
                ranks += server.children()
        return ranks

    def _kill_one(self, processes: list[psutil.Process]) -> bool:
        with suppress(IndexError, psutil.Error):
            self.chance.choice(sorted(processes, key=lambda process: process.pid)).kill()
            return True
        return False

    def _kill_controller(self) -> bool:
        self.one.kill()
        time.sleep(self.chance.uniform(0, 3))
        self.one.spawn()
        return True

    def _kill_head(self) -> bool:
        if time.monotonic() - self._head_killed_at < HEAD_PAUSE_S or "gcs" not in self.one.head()["vital"]:
            return False
        self._remember_head()
        self._head_killed_at = time.monotonic()
        return self._kill_one([psutil.Process(int(self.one.head()["vital"]["gcs"][0]))])

    def _remember_head(self) -> None:
        self.heads.add(self.one.head_id())

    # -- what must hold ----------------------------------------------------------------------------------------------

    def settle(self, report: Report) -> None:
        """Wait until every run has ended, or for as long as that may take."""
        began = time.monotonic()
        self.one.wait(self.one.is_ready, what="the service is ready again")
        while not all(run["status"] in ENDED for run in self._runs().values()):
            if time.monotonic() - began > SETTLE_LIMIT_S:
                break
            time.sleep(0.5)
        report.settled_after_s = round(time.monotonic() - began, 1)

    def _runs(self) -> dict[str, dict[str, Any]]:
        page = self.one.client.get("/runs", params={"limit": 1000}).json()["runs"]
        return {run["id"]: run for run in page}

    def judge(self, report: Report) -> None:
        runs = self._runs()
        report.kills, report.acknowledged = dict(self.kills), len(self.acknowledged)
        report.statuses = dict(Counter(run["status"] for run in runs.values()))
        report.check(set(self.acknowledged.values()) == set(runs), "acknowledged and stored runs differ")
        report.check(len(self.acknowledged) == self.runs, f"{len(self.acknowledged)} of {self.runs} were acknowledged")
        for uid in runs:
            self._judge_run(self.one.run(uid), report)
        self._judge_rows(report)
        self._judge_resources(list(runs), report)

    def _judge_run(self, run: dict[str, Any], report: Report) -> None:
        uid, attempts = run["id"], run["attempts"]
        report.attempts += len(attempts)
        ends = Counter(attempt["failure"]["kind"] if attempt["failure"] else attempt["status"] for attempt in attempts)
        report.attempts_ended_as = dict(Counter(report.attempts_ended_as) + ends)
        report.resumed_from_checkpoints += sum(attempt["first_step"] > 0 for attempt in attempts)
        used_up = run["status"] == "failed" and len(attempts) == MAX_ATTEMPTS
        # What the numbers explain is a run's own end, whoever was killed meanwhile.
        died = run["status"] == "failed" and run["failure"]["kind"] == "loss_scale_exhausted"
        report.check(run["status"] == "succeeded" or used_up or died, f"{uid} is {run['status']}: {run['failure']}")
        steps = self.one.steps(uid)
        report.steps_stored += len(steps)
        report.check(steps == list(range(len(steps))), f"{uid}: its steps have gaps or repeats")
        if run["status"] == "succeeded":
            report.check(len(steps) == run["spec"]["steps"], f"{uid}: {len(steps)} of {run['spec']['steps']} steps")

    def _judge_rows(self, report: Report) -> None:
        query = (
            "SELECT attempt.submission_id, attempt.first_step, count(*), count(DISTINCT step.step), min(step.step), "
            "max(step.step) FROM step JOIN attempt ON attempt.id = step.attempt_id GROUP BY attempt.id"
        )
        with closing(sqlite3.connect(self.one.home / "muonscope.db")) as store:
            for name, first, rows, distinct, least, most in store.execute(query):
                whole = rows == distinct == most - least + 1 and least == first
                report.check(whole, f"{name}: {rows} rows, {distinct} distinct, steps {least} to {most} from {first}")
            ((integrity,),) = store.execute("PRAGMA integrity_check").fetchall()
            report.check(integrity == "ok", f"the store's integrity: {integrity}")

    def _judge_resources(self, uids: list[str], report: Report) -> None:
        def left() -> list[str]:
            lines = [" ".join(_command(process)) for process in psutil.process_iter()]
            own = [line[:200] for line in lines if any(f"run-{uid}-" in line for uid in uids)]
            ranks = {
                rank["pid"] for uid in uids for attempt in self.one.run(uid)["attempts"] for rank in attempt["ranks"]
            }
            return own + [f"rank {pid}" for pid in ranks if _is_rank(pid)]

        def used() -> float:
            cluster = self.one.client.get("/cluster").json()
            nodes = sum(node.get("gpus_used") or 0.0 for node in cluster["nodes"])
            return float(nodes + cluster["gpus_held"])

        # A shipper leaves its drained spool to the driver for a minute before it ends.
        report.check(_within(180, lambda: not left()), f"processes of runs are left: {left()[:5]}")
        report.check(_within(120, lambda: used() == 0.0), f"{used():g} GPUs are still used")

        def total() -> float:
            return float(self.one.client.get("/cluster").json()["gpus"])

        report.check(_within(120, lambda: total() == 2), f"the cluster has {total():g} of 2 GPUs")

    def end(self, report: Report) -> None:
        """End the service, and see that nothing of it stays."""
        self._remember_head()
        assert self.one.process is not None
        self.one.process.send_signal(signal.SIGTERM)
        report.check(self.one.process.wait(180) == 0, f"the service ended with {self.one.process.returncode}")
        report.check(
            _within(120, lambda: not any(find_processes(head) for head in self.heads)),
            f"processes of Ray are left: {[process.pid for head in self.heads for process in find_processes(head)]}",
        )


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _is_rank(pid: int) -> bool:
    with suppress(psutil.Error):
        return not is_gone(pid) and psutil.Process(pid).name() == "muonscope-rank"
    return False


def _within(limit_s: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


def soak(seconds: float, runs: int, seed: int) -> Report:
    """Run the whole soak in a home of its own and say what came of it."""
    report = Report(
        command=f"python -m tests.faults.soak --seconds {seconds:g} --runs {runs} --seed {seed}",
        seed=seed,
        began=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        seconds=seconds,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("ray", "torch", "deepspeed")},
        machine=f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
    )
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    one = Installation(home, settings=SETTINGS)
    try:
        one.start()
        run = Soak(one, seconds, runs, seed)
        users = threading.Thread(target=run.submit_all, name="users")
        users.start()
        run.torment()
        users.join()
        run.settle(report)
        run.judge(report)
        run.end(report)
    finally:
        if report.broken:
            print(one.log(), file=sys.stderr)
        one.close()
    if not report.broken:
        shutil.rmtree(home, ignore_errors=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long things are killed")
    parser.add_argument("--runs", type=int, default=0, help="how many runs are submitted; 0: one each 15 seconds")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when, and of the runs; 0 takes the time")
    parser.add_argument("--report", type=Path, help="a file for the report, as JSON")
    arguments = parser.parse_args()
    seed = arguments.seed or int(time.time())
    report = soak(arguments.seconds, arguments.runs or max(4, round(arguments.seconds / 15)), seed)
    text = json.dumps(asdict(report), indent=1)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text + "\n")
    print("held" if not report.broken else "BROKEN", flush=True)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
