"""What goes wrong beside a recorded loop is the record's trouble, and never the loop's."""

from typing import Any

import httpx

from tests.integration.recording import loops, troubles
from tests.integration.recording.test_recording import Gangs


def _to(service: httpx.Client) -> dict[str, Any]:
    return {"url": str(service.base_url)}


def test_a_step_that_somebody_else_stands_in_for_is_theirs_again_after_the_record(
    gang: Gangs, service: httpx.Client
) -> None:
    ((is_theirs, calls),) = gang(1).run(troubles.stood_in_for, record=_to(service))

    assert is_theirs
    assert calls == 2 * loops.STEPS


def test_a_child_that_outlives_the_loop_does_not_keep_its_record_open(gang: Gangs, service: httpx.Client) -> None:
    (run_id,) = gang(1).run(troubles.with_a_forked_child, record={**_to(service), "patience_s": 5.0})

    run = service.get(f"/runs/{run_id}").json()
    assert (run["status"], run["summary"]["steps"]) == ("succeeded", loops.STEPS)
