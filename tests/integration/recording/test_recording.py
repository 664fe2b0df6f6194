"""`muonscope.record` around real DeepSpeed loops: everything arrives, nothing is changed, whatever ends them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from muonscope.client import Client
from tests.distributed.gang import Gang, GangFailure
from tests.integration.recording import loops
from tests.integration.recording.guide import ended, guide_script
from tests.unit.cli.conftest import RunCommand, command

__all__ = ["command"]

Gangs = Callable[[int], Gang]


def _to(service: httpx.Client) -> dict[str, Any]:
    return {"url": str(service.base_url)}


@pytest.mark.parametrize(
    ("optimizer", "stage", "ordering", "unit"),
    [
        ("muon", 1, "deferred", "loss_scaled"),
        ("adam", 2, "ordered", "unscaled"),
        ("attached", 3, "ordered", "unscaled"),
    ],
)
def test_a_recorded_loop_ends_with_the_bits_of_the_loop_alone(
    gang: Gangs, service: httpx.Client, optimizer: str, stage: int, ordering: str, unit: str
) -> None:
    alone = gang(2).run(loops.loop, optimizer=optimizer, stage=stage)
    recorded = gang(2).run(loops.loop, optimizer=optimizer, stage=stage, record=_to(service))

    assert [each["hash"] for each in recorded] == [each["hash"] for each in alone]
    assert all(each["left_as_found"] for each in recorded)
    assert recorded[1]["run_id"] == recorded[0]["run_id"]
    run = ended(service, recorded[0]["run_id"])
    steps = service.get(f"/runs/{run['id']}/steps").json()["steps"]
    assert (run["status"], run["verdict"]["name"], run["summary"]["steps"]) == ("succeeded", "trains", loops.STEPS)
    assert "no_muon" not in [finding["name"] for finding in run["findings"]]
    assert run["spec"]["task"]["is_open_ended"]
    assert (run["spec"]["step_ordering"], run["spec"]["world_size"]) == (ordering, 2)
    assert run["spec"]["loss_scale"]["initial_power"] == 20
    assert run["attempts"][0]["momentum_unit"] == unit
    assert steps[0]["discarded"]
    assert not steps[-1]["discarded"]
    assert steps[0]["loss_scale_before"] == 2**20
    assert all(step["loss"] > 0 for step in steps)
    # Counter-test: an optimizer that is not read would leave the momentum unmeasured.
    assert [step["momentum_norm"] > 0 for step in steps] == [not step["discarded"] for step in steps[:-1]] + [True]
    assert len(service.get(f"/runs/{run['id']}/parameters").json()["parameters"]) == 4


def test_an_optimizer_of_muon_cores_that_nobody_attached_is_refused_on_entering(
    gang: Gangs, service: httpx.Client
) -> None:
    before = service.get("/runs").json()["runs"]
    found = gang(2).run(loops.refused, optimizer="unattached", record=_to(service))

    assert [name for name, *_ in found] == ["NotAttached", "NotAttached"]
    assert all("muon_core.attach(engine, optimizer)" in remedy for *_, remedy in found)
    assert service.get("/runs").json()["runs"] == before


@pytest.mark.parametrize(("planned", "status"), [(loops.STEPS, "succeeded"), (loops.STEPS + 2, "stopped")])
def test_a_loop_that_is_left_before_its_last_step_has_been_stopped(
    gang: Gangs, service: httpx.Client, planned: int, status: str
) -> None:
    (recorded,) = gang(1).run(loops.loop, optimizer="adam", stage=1, record={**_to(service), "steps": planned})
    run = ended(service, recorded["run_id"])

    assert (run["status"], run["summary"]["steps"], run["spec"]["steps"]) == (status, loops.STEPS, planned)
    assert (run["verdict"]["name"] == "trains") == (status == "succeeded")
    assert run["failure"] is None


def test_a_setting_that_no_spec_can_hold_is_warned_of_and_the_loop_is_recorded_all_the_same(
    gang: Gangs, service: httpx.Client
) -> None:
    ((run_id, warned),) = gang(1).run(loops.unholdable, record=_to(service))
    # The counter-test: settings that a spec holds are recorded without a word.
    plain = gang(1).run(loops.loop, optimizer="adam", stage=1, record=_to(service))[0]["run_id"]

    assert [warning.partition(" and shows its default")[0] for warning in warned] == [
        f"the record cannot hold {field}=-0.5" for field in ("optimizer.weight_decay", "optimizer.adam.weight_decay")
    ]
    run, other = ended(service, run_id)["spec"]["optimizer"], ended(service, plain)
    assert other["summary"]["steps"] == loops.STEPS
    assert (run["lr"], run["adam"]["lr"]) == (1e-3, 1e-3)
    assert (run["weight_decay"], other["spec"]["optimizer"]["weight_decay"]) == (0.0, 0.01)


def test_a_first_step_that_takes_long_is_told_of_on_rank_0_and_trained_as_ever(
    gang: Gangs, service: httpx.Client
) -> None:
    alone = gang(2).run(loops.loop, optimizer="muon", stage=1)
    slow = gang(2).run(loops.slow_at_first, record=_to(service), after_s=0.01, is_told=True)
    in_time = gang(2).run(loops.slow_at_first, record=_to(service), after_s=600.0, is_told=False)

    (_, said), (_, of_others) = slow
    assert said.count("the first step is still under way after 0.01 s. DeepSpeed's own Muon may be compiling") == 1
    assert of_others == ""
    assert [said for _, said in in_time] == ["", ""]
    assert [found for found, _ in slow] == [found for found, _ in in_time] == [each["hash"] for each in alone]


def test_two_recordings_compare(gang: Gangs, service: httpx.Client) -> None:
    ids = [
        gang(1).run(loops.loop, optimizer=optimizer, stage=1, record=_to(service))[0]["run_id"]
        for optimizer in ("muon", "attached")
    ]
    with Client(str(service.base_url)) as client:
        comparison = client.compare(*ids)

    fields = {difference["field"] for difference in comparison.model_dump()["spec_difference"]}
    assert {"implementation", "step_ordering", "task.optimizer"} <= fields
    assert "steps" not in fields
    # One is DeepSpeed's Muon and the other ours; both have Adam as the scripts ask for it.
    assert {name for name in fields if name.startswith("optimizer.")} <= {"optimizer.adam.beta2", "optimizer.adam.eps"}


@pytest.mark.parametrize("optimizer", ["muon", "attached"])
def test_two_scripts_that_differ_in_the_rate_of_adam_alone_are_told_apart_by_it(
    gang: Gangs, service: httpx.Client, optimizer: str
) -> None:
    ids = [
        gang(1).run(loops.loop, optimizer=optimizer, stage=1, record=_to(service), adam_lr=lr)[0]["run_id"]
        for lr in (1e-3, 1e-2)
    ]
    with Client(str(service.base_url)) as client:
        comparison = client.compare(*ids)

    found = [(each["field"], each["a"], each["b"]) for each in comparison.model_dump()["spec_difference"]]
    assert found == [("optimizer.adam.lr", 1e-3, 1e-2)]


def test_an_error_in_the_script_is_the_runs_own_and_loses_no_step(gang: Gangs, service: httpx.Client) -> None:
    (done,) = gang(1).run(loops.loop, optimizer="muon", stage=1, ends="raises", record=_to(service))

    run = ended(service, done["run_id"])
    assert done["error"] == "ZeroDivisionError"
    assert (run["status"], run["failure"]["kind"], run["summary"]["steps"]) == ("failed", "task_error", 4)
    assert len(run["attempts"]) == 1


def test_an_exhausted_loss_scale_is_a_death_at_its_step(gang: Gangs, service: httpx.Client) -> None:
    (done,) = gang(1).run(loops.loop, optimizer="muon", stage=1, ends="exhausted", record=_to(service))

    run = ended(service, done["run_id"])
    assert (run["verdict"]["name"], run["failure"]["kind"]) == ("dies", "loss_scale_exhausted")
    assert run["verdict"]["step"] == run["summary"]["steps"]


def test_a_killed_script_leaves_every_step_but_the_one_under_way(service: httpx.Client) -> None:
    before = {run["id"] for run in service.get("/runs").json()["runs"]}
    ranks = Gang(1)
    with pytest.raises(GangFailure, match="exit code -9"):
        ranks.run(loops.loop, optimizer="adam", stage=1, ends="killed", record=_to(service))

    (run_id,) = {run["id"] for run in service.get("/runs").json()["runs"]} - before
    run = ended(service, run_id)
    # Four steps were taken; the record of the fourth was still being measured.
    assert (run["status"], run["failure"]["kind"], run["summary"]["steps"]) == ("failed", "worker_died", 3)
    assert "without a word" in run["failure"]["message"]


def test_a_recorded_run_is_nobodys_to_stop_retry_or_clone(gang: Gangs, service: httpx.Client) -> None:
    (done,) = gang(1).run(loops.loop, optimizer="adam", stage=1, ends="raises", record=_to(service))
    run = ended(service, done["run_id"])

    retried = service.post(f"/runs/{run['id']}/retry")
    cloned = service.post(f"/runs/{run['id']}/clone")
    submitted = service.post("/runs", json={"task": {"name": "external"}})

    assert (retried.status_code, cloned.status_code, submitted.status_code) == (409, 422, 422)
    assert "start the script again" in retried.json()["remedy"]
    assert "muonscope.record" in submitted.json()["remedy"]


def test_a_record_file_is_imported_whole_and_once(
    gang: Gangs, service: httpx.Client, command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.db"
    (done,) = gang(1).run(loops.loop, optimizer="muon", stage=2, record={"file": str(file)})
    monkeypatch.setenv("MUONSCOPE_URL", str(service.base_url))

    first, again = (json.loads(command("import", str(file), "--json").out) for _ in range(2))

    printed = command("import", str(file)).out

    (run,) = first
    assert printed.startswith(f"{done['run_id']} is run {run['id']} already here: {loops.STEPS} steps of ")
    assert again[0]["id"] == run["id"] != done["run_id"]
    assert (run["status"], run["verdict"]["name"], run["summary"]["steps"]) == ("succeeded", "trains", loops.STEPS)
    assert run["attempts"][0]["initial_parameters_hash"]
    steps = service.get(f"/runs/{run['id']}/steps").json()["steps"]
    assert steps[-1]["momentum_norm"] > 0
    assert len(service.get(f"/runs/{run['id']}/parameters").json()["parameters"]) == 4


def test_what_is_no_record_file_is_said_to_be_none(command: RunCommand, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no record")

    failed = command("import", str(other))

    assert failed.code == 1
    assert "is no record file" in failed.err


def test_the_guides_script_is_recorded(gang: Gangs, service: httpx.Client, tmp_path: Path) -> None:
    (printed,) = gang(1).run(
        loops.script, text=guide_script("recorded.py"), url=str(service.base_url), folder=str(tmp_path)
    )

    run = ended(service, printed.split()[-1])
    assert (run["name"], run["verdict"]["name"]) == ("stock Muon", "trains")
    assert run["summary"]["steps"] == run["spec"]["steps"] == 40
    assert run["summary"]["discarded"] > 0


def test_what_cannot_be_recorded_is_told_before_the_first_step(gang: Gangs, tmp_path: Path) -> None:
    nobody = gang(2).run(loops.refused, record={"url": "http://127.0.0.1:9"})
    (nowhere,) = gang(1).run(loops.refused, record={"file": "/proc/none/mine.db"})

    assert [name for name, *_ in nobody] == ["ServiceUnreachable", "RecordingFailed"]
    assert all("muonscope up" in (remedy or "") for *_, remedy in nobody)
    assert nowhere[0] == "RecordingFailed"
    assert "cannot be written" in nowhere[1]


def test_a_spool_that_cannot_be_kept_is_told_on_every_rank_and_none_waits_for_another(
    gang: Gangs, service: httpx.Client
) -> None:
    refused = gang(2).run(loops.refused, record=_to(service), temporary="/proc/none")

    assert [name for name, *_ in refused] == ["RecordingFailed"] * 2
    assert all("the spool cannot be kept: " in said and "/proc/none" in said for _, said, _ in refused)
    assert all("TMPDIR" in (remedy or "") for *_, remedy in refused)
