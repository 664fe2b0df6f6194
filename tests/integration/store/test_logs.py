"""Logs by rank: kept once, bounded, with their middle left out and said so."""

import pytest

from muonscope.contract.attempts import LogPiece
from muonscope.contract.run_spec import RunSpec
from service.errors import InvalidInput
from service.store import logs as store_logs
from service.store.attempts import AttemptRepository
from service.store.logs import DRIVER, LogRepository
from service.store.models import Attempt
from service.store.runs import RunRepository
from service.store.session import Database, Session


def new_attempt(session: Session) -> Attempt:
    run, _ = RunRepository(session).create(RunSpec(world_size=2))
    AttemptRepository(session).create(run, enrolment_token="t", lease_s=1)
    return AttemptRepository(session).get(f"run-{run.uid}-a1")


def piece(start: int, text: str, rank: int | None = 0) -> LogPiece:
    return LogPiece(rank=rank, start=start, stop=start + len(text), text=text)


def test_pieces_are_kept_by_rank_and_a_repeated_one_once(database: Database) -> None:
    with database.write() as session:
        attempt, logs = new_attempt(session), LogRepository(session)

        assert logs.append(attempt, piece(0, "one\n")) == 4
        assert logs.append(attempt, piece(0, "one\n")) == 4
        assert logs.append(attempt, piece(4, "two\n")) == 8
        logs.append(attempt, piece(0, "driver\n", rank=None))

        assert logs.read(attempt, 0) == "one\ntwo\n"
        assert logs.read(attempt, DRIVER) == "driver\n"
        assert logs.ranks(attempt) == {DRIVER: 7, 0: 8}


def test_what_never_came_is_said_where_it_is_missing(database: Database) -> None:
    with database.write() as session:
        attempt, logs = new_attempt(session), LogRepository(session)
        logs.append(attempt, piece(0, "one\n"))
        logs.append(attempt, piece(100, "late\n"))

        assert logs.read(attempt, 0) == "one\n\n[... 96 bytes left out ...]\nlate\n"


def test_of_a_long_log_beginning_and_end_are_kept(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_logs, "KEPT_HEAD_BYTES", 20)
    monkeypatch.setattr(store_logs, "KEPT_TAIL_BYTES", 20)
    with database.write() as session:
        attempt, logs = new_attempt(session), LogRepository(session)
        for number in range(20):
            logs.append(attempt, piece(10 * number, f"line {number:3d} \n"))

        text = logs.read(attempt, 0)

    assert text.startswith("line   0 \nline   1 \n\n[... ")
    assert text.endswith("line  19 \n")
    assert len(text) < 100


def test_a_rank_that_the_run_does_not_have_is_refused(database: Database) -> None:
    with database.write() as session, pytest.raises(InvalidInput, match="rank 2 does not exist"):
        LogRepository(session).append(new_attempt(session), piece(0, "x", rank=2))


def test_sizes_are_those_of_what_is_read(database: Database) -> None:
    with database.write() as session:
        attempt, logs = new_attempt(session), LogRepository(session)
        for rank, text in ((None, "driver\n"), (0, "Größe: 3 µs\x00\n"), (0, "late\n"), (1, "")):
            logs.append(attempt, LogPiece(rank=rank, start=0, stop=30, text=text))
        logs.append(attempt, piece(100, "späte\n"))

        sizes = logs.sizes(attempt)

        assert sizes == {rank: len(logs.read(attempt, rank).encode()) for rank in (DRIVER, 0, 1)}
        assert sizes[0] > len(logs.read(attempt, 0))
