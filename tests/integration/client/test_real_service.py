"""The client and the command against the real service over real HTTP; only the cluster is in memory."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import httpx
import pytest

from muonscope.client import AsyncClient, Client
from muonscope.contract.run_spec import ByteGptTask, RunSpec
from muonscope.contract.status import RunStatus, Verdict
from muonscope.errors import Conflict, InvalidRequest, NotFound
from service.controller.launcher import JobStatus
from tests.integration.api_telemetry.workers import Workers, die, train
from tests.unit.cli.conftest import RunCommand, command
from tests.unit.cli.test_every_verb import LONG, VERBS, guide_lines
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving, short_rests

__all__ = ["command"]


class Cluster:
    """Plays the workers of whatever the controller submits."""

    def __init__(self, http: httpx.Client, launcher: FakeLauncher) -> None:
        self.http, self.launcher = http, launcher

    def workers_of(self, run_id: str) -> Workers:
        """Wait for the run's job and enrol as its driver would."""
        submission_id = f"run-{run_id}-a1"
        deadline = time.monotonic() + 90
        while submission_id not in self.launcher.requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        token = self.launcher.requests[submission_id].enrolment_token
        enrolled = self.http.post(f"/attempts/{submission_id}/enrol", json={"token": token}).json()
        return Workers(self.http, run_id, submission_id, enrolled["token"], enrolled["epoch"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    launcher = FakeLauncher(gpus=64.0)
    with short_rests(), serving(tmp_path_factory.mktemp("home"), launcher) as http:
        yield Cluster(http, launcher)


@pytest.fixture
def client(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    url = str(cluster.http.base_url)
    monkeypatch.setenv("MUONSCOPE_URL", url)
    with Client() as client:
        yield client


def trained(client: Client, cluster: Cluster, **changes: object) -> str:
    run = client.runs.submit({"name": "trains", "steps": 30, **changes})
    train(cluster.workers_of(run.id))
    return run.id


def died(client: Client, cluster: Cluster) -> str:
    run = client.runs.submit({"name": "dies", "steps": 30, "step_ordering": "master"})
    die(cluster.workers_of(run.id))
    return run.id


def hold_a_gpu(client: Client, cluster: Cluster) -> None:
    """Have a run train on and on: one of all the cluster's GPUs waits from now on."""
    cluster.workers_of(client.runs.submit({"name": "trains on"}).id)


def test_a_typed_spec_is_the_spec_that_is_stored(client: Client) -> None:
    spec = RunSpec(name="typed", task=ByteGptTask(num_layers=1), steps=7)

    run = client.runs.get(client.runs.submit(spec).id)

    assert run.run_spec() == spec
    assert run.fingerprint == spec.fingerprint()


def test_the_same_key_is_the_same_run_and_another_key_another(client: Client) -> None:
    first = client.runs.submit({"name": "once"}, idempotency_key="key-1")
    again = client.runs.submit({"name": "once"}, idempotency_key="key-1")
    other = client.runs.submit({"name": "once"}, idempotency_key="key-2")

    assert first.id == again.id != other.id
    with pytest.raises(Conflict):
        client.runs.submit({"name": "another body"}, idempotency_key="key-1")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"zero_stage": 7}, "zero_stage"),
        ({"steps": -1}, "steps"),
        ({"surprise": 1}, "surprise"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr"),
        ({"world_size": 1000}, "world_size"),
        ({"task": {"name": "nonsense"}}, "task"),
    ],
)
def test_a_refused_spec_names_its_field_and_has_a_remedy(spec: dict[str, object], field: str, client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.runs.submit(spec)

    assert (caught.value.field or "").startswith(field)
    assert caught.value.remedy


def test_a_whole_run_reads_back_typed(client: Client, cluster: Cluster) -> None:
    run = client.runs.get(died(client, cluster))
    steps = list(client.runs.steps(run.id))

    assert run.status is RunStatus.FAILED
    assert run.verdict is not None
    assert (run.verdict.name, run.verdict.step, run.summary.overflows) == (Verdict.DIES, 17, 17)
    assert [step.step for step in steps] == list(range(17))
    assert steps[0].momentum_norm == math.inf
    assert steps[1].momentum_norm is not None
    assert math.isnan(steps[1].momentum_norm)
    assert steps[1].update_norm is None


def test_parameters_norms_series_and_csv_read_back(client: Client, cluster: Cluster) -> None:
    run_id = died(client, cluster)

    parameters = client.runs.parameters(run_id)
    norms = list(client.runs.parameter_steps(run_id, 0))
    series = client.runs.series(run_id, ["loss", "momentum_norm"])
    rows = "".join(client.runs.csv(run_id)).splitlines()

    assert [parameter.route for parameter in parameters] == ["muon", "adamw"]
    assert len(norms) == 17
    assert series.exact
    assert series.discarded_runs == [[0, 16]]
    assert [run["value"] for run in series.nonfinite_runs["momentum_norm"]] == ["Infinity", "NaN"]
    assert len(rows) == 18


def test_pages_of_runs_join_without_gap_or_repeat(client: Client) -> None:
    submitted = {client.runs.submit({"name": f"page-{n}", "tags": ["paged"]}).id for n in range(5)}

    seen = []
    cursor: str | int | None = None
    while True:
        page = client.runs.page("tag:paged", cursor=cursor, limit=2)
        seen += [run.id for run in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break

    assert len(seen) == 5
    assert set(seen) == submitted


def test_one_parameters_norms_come_as_rows_and_as_a_chart(client: Client, cluster: Cluster) -> None:
    run_id = trained(client, cluster)

    rows = list(client.runs.parameter_steps(run_id, 1))
    chart = client.runs.parameter_series(run_id, 1, max_points=100)

    assert len(rows) == 30
    assert chart.exact
    assert chart.series["step"] == [row.step for row in rows]
    assert chart.series["momentum_norm"] == [row.momentum_norm for row in rows]


def _monitor_folder(folder: Path) -> Path:
    """Write what DeepSpeed's CSV monitor writes of four fp16 steps of 8 samples, the third of which overflows."""
    folder.mkdir()
    series = {
        "train_loss": ["0,3.5", "8,2.5", "16,nan", "24,inf"],
        "lr": ["8,0.01", "16,0.02", "24,0.02", "32,0.02"],
        "loss_scale": ["8,65536.0", "16,65536.0", "24,32768.0", "32,32768.0"],
    }
    for name, rows in series.items():
        (folder / f"Train_Samples_{name}.csv").write_text("\r\n".join([f"step,Train/Samples/{name}", *rows, ""]))
    return folder


def test_a_deepspeed_monitors_folder_becomes_a_run_with_every_value_it_holds(
    client: Client, command: RunCommand, tmp_path: Path
) -> None:
    result = command("import", str(_monitor_folder(tmp_path / "my-job")), "--json")

    assert result.code == 0, result.err
    (imported,) = json.loads(result.out)
    run = client.runs.get(imported["id"])
    assert (run.name, run.status, run.summary.steps, run.summary.overflows) == ("my-job", RunStatus.SUCCEEDED, 4, 1)
    steps = list(client.runs.steps(run.id))
    assert [repr(step.loss) for step in steps] == ["3.5", "2.5", "nan", "inf"]
    assert [(step.lr, step.loss_scale_after, step.discarded) for step in steps] == [
        (0.01, 65536.0, False), (0.02, 65536.0, False), (0.02, 32768.0, True), (0.02, 32768.0, False),
    ]  # fmt: skip
    assert all(step.grad_norm is None for step in steps)
    assert "my-job" in command("show", run.id).out


def test_a_folder_that_no_monitor_wrote_is_refused_and_becomes_no_run(
    client: Client, command: RunCommand, tmp_path: Path
) -> None:
    before = len(client.runs.page("tag:imported").items)
    result = command("import", str(tmp_path))

    assert result.code == 1
    assert "Train_Samples_train_loss.csv" in result.err
    assert "<output_path>/<job_name>" in result.err
    assert len(client.runs.page("tag:imported").items) == before


def test_a_followed_stream_ends_with_the_run_and_has_its_whole_history(client: Client, cluster: Cluster) -> None:
    run = client.runs.submit({"name": "followed"})
    workers = cluster.workers_of(run.id)
    trainer = threading.Thread(target=train, args=(workers,))
    trainer.start()

    events = list(client.runs.events(run.id))
    trainer.join()

    history = [event.data["id"] for event in events if event.event == "event"]
    assert history == sorted({entry.id for entry in client.runs.history(run.id)})
    assert [event.data["status"] for event in events if event.event == "run"][-1] == "succeeded"


def test_the_asynchronous_client_follows_the_same_stream(client: Client, cluster: Cluster) -> None:
    run_id = trained(client, cluster)

    async def follow() -> list[str]:
        async with AsyncClient(client.url) as asynchronous:
            statuses = [state.status async for state in asynchronous.runs.watch(run_id)]
            events = [event.event async for event in asynchronous.runs.events(run_id)]
            return [*map(str, statuses), events[0]]

    assert asyncio.run(follow()) == ["succeeded", "run"]


def test_a_queued_run_is_stopped_and_a_finished_one_cannot_be(client: Client, cluster: Cluster) -> None:
    hold_a_gpu(client, cluster)
    waiting = client.runs.submit({"name": "stopped", "world_size": 64, "priority": -1000})
    finished = trained(client, cluster)

    client.runs.stop(waiting.id)

    with pytest.raises(Conflict, match="succeeded already"):
        client.runs.stop(finished)
    with pytest.raises(NotFound):
        client.runs.stop("nothing")


def test_two_runs_compare_typed(client: Client, cluster: Cluster) -> None:
    comparison = client.compare(died(client, cluster), trained(client, cluster))

    assert [difference.field for difference in comparison.spec_difference] == ["step_ordering"]
    assert comparison.is_pair
    assert comparison.first_divergence is not None
    assert comparison.explanation


def test_an_experiment_reads_back_with_its_table(client: Client) -> None:
    created = client.experiments.create_builtin("thirty-step")
    experiment = client.experiments.get(created.id)

    assert len(experiment.runs) == len(experiment.table.rows) == 8
    assert experiment.table.run_ids == [run.id for run in experiment.runs]
    assert created.id in [each.id for each in client.experiments.list()]
    assert client.experiments.table(created.id, "csv").startswith("run,stage,initial scale,ordering")
    for run in experiment.runs:
        client.runs.stop(run.id)


def test_a_matrix_experiment_has_a_run_for_every_combination(client: Client) -> None:
    created = client.experiments.create(
        "matrix", {"steps": 5}, {"zero_stage": [1, 2], "step_ordering": ["master", "ordered"]}
    )

    assert {(run.spec["zero_stage"], run.spec["step_ordering"]) for run in created.runs} == {
        (stage, ordering) for stage in (1, 2) for ordering in ("master", "ordered")
    }


def test_cluster_and_health_answer(client: Client) -> None:
    assert client.cluster()["gpus"] == 64.0
    assert client.health()["status"] == "alive"
    assert client.readiness()["status"] == "ready"


def test_every_verb_that_reads_works_on_a_real_record(client: Client, cluster: Cluster, command: RunCommand) -> None:
    dead, alive = died(client, cluster), trained(client, cluster)

    shown = command("show", dead)
    listed = command("ls", f"name:{'dies'}")
    compared = command("compare", dead, alive)
    watched = command("watch", dead)
    exported = command("export", dead)
    logs = command("logs", dead)

    assert "dies, step 17" in shown.out
    assert dead in listed.out
    assert "step_ordering" in compared.out
    assert watched.code == 3
    assert len(exported.out.splitlines()) == 18
    assert logs.out == f"log of run-{dead}-a1"


def test_the_guides_commands_are_typed_as_they_are_printed_and_every_verb_answers_in_json(
    client: Client, cluster: Cluster, command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = died(client, cluster), trained(client, cluster)
    hold_a_gpu(client, cluster)
    waiting = client.runs.submit({"name": "waits", "world_size": 64}).id
    hook = client.alerts.create("in json", "https://hooks.invalid/x", {"kind": "verdict", "verdicts": ["dies"]}).id
    experiment = client.experiments.create("asked in json", {}, {"zero_stage": [1]}).id
    (tmp_path / "spec.yaml").write_text("name: asked in json\n")
    monitor = _monitor_folder(tmp_path / "job")
    monkeypatch.chdir(tmp_path)
    meant = {
        "RUN...": alive, "RUN": alive, "A": dead, "B": alive, "ID": experiment, "ALERT": hook, "PATH": str(monitor),
        "[QUERY]": "waits", "[--follow]": "--follow", "URL": "https://hooks.invalid/y", "FILE": "copy.db", "ANN": "bob",
    }  # fmt: skip
    answers = {}
    printed = [guide_lines(document) for document in ("guides/command-line.md", "guides/alerts.md", "security.md")]
    for line in (*chain(*printed), "queue resume", "queue drain"):
        words = [meant.get(word, word) for word in line.split()]
        verb = " ".join(words[:2]) if " ".join(words[:2]) in VERBS else words[0]
        if verb in LONG:
            continue
        # What the guide calls RUN is one that can be stopped, or retried.
        words = [{"stop": waiting, "retry": dead}.get(verb, word) if word == alive else word for word in words]
        answers[verb, line] = command(*words, "--json")
    client.set_queue_mode("resume")

    assert {verb for verb, _ in answers} == VERBS.keys() - LONG
    unreadable = {line: answer.out + answer.err for (_, line), answer in answers.items() if not _is_json(answer.out)}
    assert unreadable == {}
    # What the doctor finds is the machine's matter; there is no receiver of messages.
    codes = {line: answer.code for (verb, line), answer in answers.items() if verb not in ("doctor", "alert test")}
    assert {line for line, code in codes.items() if code != 0} == set()


def _is_json(printed: str) -> bool:
    """Whether it is one document, or one a line."""
    try:
        json.loads(printed)
    except ValueError:
        try:
            return bool([json.loads(line) for line in printed.splitlines()])
        except ValueError:
            return False
    return True


def test_run_follows_a_real_run_to_its_end(
    client: Client, cluster: Cluster, command: RunCommand, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: followed to the end\nsteps: 30\n")

    def play() -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            for run in client.runs.list():
                if run.name == "followed to the end" and run.status is not RunStatus.QUEUED:
                    train(cluster.workers_of(run.id))
                    return
            time.sleep(0.05)

    player = threading.Thread(target=play)
    player.start()
    result = command("run", str(path), "--json")
    player.join()

    assert result.code == 0
    assert json.loads(result.out)["verdict"]["name"] == "trains"


def test_a_run_whose_job_was_killed_is_a_failure_to_the_shell(
    client: Client, cluster: Cluster, command: RunCommand
) -> None:
    run = client.runs.submit({"name": "killed"})
    workers = cluster.workers_of(run.id)
    failure = {"kind": "task_error", "rank": 0, "step": None, "message": "the task raised"}
    workers.outcome("failed", 0, failure=failure)
    cluster.launcher.end(workers.attempt_id, JobStatus.FAILED)

    result = command("watch", run.id)

    assert result.code == 1
    assert "failed" in result.out


def test_a_record_that_is_not_there_is_said_to_be_missing(client: Client, command: RunCommand, tmp_path: Path) -> None:
    result = command("import", str(tmp_path / "nothing.db"))

    assert result.code == 1
    assert "no such file or folder" in result.err
