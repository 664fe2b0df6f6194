"""How busy ranks were: stored once a moment, read in pages."""

from typing import Any

import httpx

from service.store.session import Database
from tests.integration.api_telemetry.workers import Workers, next_workers, workers
from tests.records import end_attempt


def _sample(at: float, rank: int = 0, **values: Any) -> dict[str, Any]:
    return {"rank": rank, "at": at, "cpu_percent": 99.5, "memory_bytes": 2**40, **values}


def _read(voice: Workers, **params: Any) -> dict[str, Any]:
    answer: dict[str, Any] = voice.client.get(f"/runs/{voice.run_id}/load", params=params).json()
    return answer


def test_samples_come_back_as_they_were_sent_and_what_was_not_measured_is_null(
    any_client: httpx.Client, database: Database
) -> None:
    voice = workers(any_client, database)
    sent = [_sample(1000.25), _sample(1000.5, rank=1, gpu_percent=12.5, gpu_memory_bytes=7, gpu_memory_total_bytes=9)]
    assert voice.post("load", {"samples": sent}).status_code == 204
    # A repeat whose answer was lost.
    assert voice.post("load", {"samples": [*sent, _sample(1005.25)]}).status_code == 204

    answer = _read(voice)

    assert answer["next_after"] is None
    assert [(row["at"], row["rank"], row["attempt"]) for row in answer["samples"]] == [
        (1000.25, 0, 1), (1000.5, 1, 1), (1005.25, 0, 1),
    ]  # fmt: skip
    first, second, _ = answer["samples"]
    assert (first["cpu_percent"], first["memory_bytes"], first["gpu_percent"]) == (99.5, 2**40, None)
    assert (second["gpu_percent"], second["gpu_memory_bytes"], second["gpu_memory_total_bytes"]) == (12.5, 7, 9)


def test_a_page_never_parts_ranks_that_share_a_moment(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.post("load", {"samples": [_sample(float(at), rank) for at in (10, 20, 30) for rank in (0, 1)]})

    first = _read(voice, limit=3)
    second = _read(voice, limit=3, after=first["next_after"])
    third = _read(voice, limit=3, after=second["next_after"])

    assert [len(page["samples"]) for page in (first, second, third)] == [2, 2, 2]
    assert (first["next_after"], second["next_after"], third["next_after"]) == (10.0, 20.0, None)


def test_each_attempt_can_be_asked_for(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)
    voice.post("load", {"samples": [_sample(1.0)]})
    end_attempt(sqlite_database, voice.attempt_id)
    second = next_workers(voice, sqlite_database)
    second.post("load", {"samples": [_sample(2.0)]})

    assert [row["at"] for row in _read(voice, attempt=2)["samples"]] == [2.0]
    assert len(_read(voice)["samples"]) == 2
    assert voice.post("load", {"samples": [_sample(3.0)]}).status_code == 409


def test_what_no_rank_can_have_measured_is_refused(client: httpx.Client, sqlite_database: Database) -> None:
    voice = workers(client, sqlite_database)

    def refusal(**values: Any) -> tuple[int, str]:
        answer = voice.post("load", {"samples": [{**_sample(1.0), **values}]})
        return answer.status_code, str(answer.json().get("field"))

    assert refusal(rank=2) == (422, "samples.rank")
    assert refusal(memory_bytes=-1)[0] == 422
    assert refusal(at=-5)[0] == 422
    assert voice.client.post(f"/attempts/{voice.attempt_id}/load", json={"samples": []}).status_code == 401
    assert voice.client.get("/runs/none/load").status_code == 404
