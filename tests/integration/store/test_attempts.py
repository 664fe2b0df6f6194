from datetime import timedelta

import pytest

from muonscope.contract.attempts import AttemptFacts, Heartbeat, ParameterFact, RankFact
from muonscope.contract.status import AttemptStatus, MomentumUnit, ParameterRoute, Phase
from service.errors import Conflict, IllegalTransition, InvalidInput, NotFound, Unauthorized
from service.store.attempts import AttemptRepository
from service.store.parameters import ParameterRepository
from service.store.session import Database
from service.store.types import read_clock
from tests.records import (
    ENROLMENT_TOKEN,
    TOKEN,
    end_attempt,
    get_attempt,
    get_run,
    queue_run,
    start_attempt,
    started,
)


def test_attempts_are_numbered_and_each_has_a_newer_epoch(database: Database) -> None:
    uid, first = started(database)
    end_attempt(database, first)
    second = start_attempt(database, uid)

    assert (first, second) == (f"run-{uid}-a1", f"run-{uid}-a2")
    with database.read() as session:
        assert [(attempt.number, attempt.epoch) for attempt in get_run(session, uid).attempts] == [(1, 1), (2, 2)]


def test_a_second_attempt_waits_for_the_end_of_the_first(database: Database) -> None:
    uid, _ = started(database)
    with pytest.raises(IllegalTransition, match="still pending"):
        start_attempt(database, uid)


def test_an_enrolment_token_works_once(database: Database) -> None:
    _, submission_id = started(database)
    with pytest.raises(Conflict, match="works once"), database.write() as session:
        AttemptRepository(session).enrol(submission_id, enrolment_token=ENROLMENT_TOKEN, token="other", lease_s=1)

    with database.read() as session:
        assert AttemptRepository(session).authenticate(submission_id, TOKEN).submission_id == submission_id


def test_a_wrong_enrolment_token_neither_enrols_nor_uses_the_right_one_up(database: Database) -> None:
    uid = queue_run(database)
    with database.write() as session:
        attempt = AttemptRepository(session).create(get_run(session, uid), enrolment_token="right", lease_s=9)
    with pytest.raises(Unauthorized), database.write() as session:
        AttemptRepository(session).enrol(attempt.submission_id, enrolment_token="wrong", token="t", lease_s=9)
    with database.write() as session:
        AttemptRepository(session).enrol(attempt.submission_id, enrolment_token="right", token="t", lease_s=9)


@pytest.mark.parametrize("token", [None, "", "wrong", ENROLMENT_TOKEN, "\ud800"])
def test_no_token_but_the_attempts_own_speaks_for_it(sqlite_database: Database, token: str | None) -> None:
    _, submission_id = started(sqlite_database)
    with pytest.raises(Unauthorized), sqlite_database.read() as session:
        AttemptRepository(session).authenticate(submission_id, token)


def test_an_attempt_that_has_not_enrolled_has_no_token_at_all(sqlite_database: Database) -> None:
    uid = queue_run(sqlite_database)
    with sqlite_database.write() as session:
        attempt = AttemptRepository(session).create(get_run(session, uid), enrolment_token="e", lease_s=9)
    with pytest.raises(Unauthorized), sqlite_database.read() as session:
        AttemptRepository(session).authenticate(attempt.submission_id, "")
    with pytest.raises(NotFound), sqlite_database.read() as session:
        AttemptRepository(session).authenticate("run-x-a1", TOKEN)


def test_tokens_are_not_kept_as_they_are(database: Database) -> None:
    _, submission_id = started(database)
    with database.read() as session:
        attempt = get_attempt(session, submission_id)
        kept = {name: getattr(attempt, name) for name in type(attempt).__mapper__.columns.keys()}  # noqa: SIM118
    assert TOKEN not in str(kept)
    assert ENROLMENT_TOKEN not in str(kept)


def test_a_superseded_attempt_is_fenced_and_the_newest_is_not(database: Database) -> None:
    uid, first = started(database)
    end_attempt(database, first, AttemptStatus.LOST)
    second = start_attempt(database, uid)
    with database.read() as session:
        attempts = AttemptRepository(session)
        attempts.fence(attempts.get(second), 2)
        for attempt, epoch, why in ((first, 1, "superseded"), (second, 1, "superseded"), (second, 3, "superseded")):
            with pytest.raises(Conflict, match=why):
                attempts.fence(attempts.get(attempt), epoch)


def test_an_attempt_that_has_ended_is_fenced(database: Database) -> None:
    _, submission_id = started(database)
    end_attempt(database, submission_id, AttemptStatus.LOST)
    with pytest.raises(Conflict, match="ended as lost"), database.read() as session:
        AttemptRepository(session).fence(get_attempt(session, submission_id), 1)


def test_a_heartbeat_extends_the_lease_on_the_databases_clock(database: Database) -> None:
    _, submission_id = started(database)
    beat = Heartbeat(status=AttemptStatus.RUNNING, steps_recorded=7, silent_ranks=[1])
    with database.write() as session:
        AttemptRepository(session).heartbeat(get_attempt(session, submission_id), beat, lease_s=100)

    with database.read() as session:
        attempt, now = get_attempt(session, submission_id), read_clock(session)
        assert attempt.heartbeat_at is not None
        assert timedelta(0) <= now - attempt.heartbeat_at < timedelta(seconds=20)
        assert attempt.lease_expires_at - attempt.heartbeat_at == timedelta(seconds=100)
        assert (attempt.steps_recorded, attempt.silent_ranks) == (7, [1])
        assert AttemptRepository(session).expired() == []


def test_only_live_attempts_past_their_lease_have_expired(database: Database) -> None:
    submission_ids = [started(database)[1] for _ in range(3)]
    with database.write() as session:
        attempts = AttemptRepository(session)
        for submission_id in submission_ids[:2]:
            attempts.extend_lease(attempts.get(submission_id), lease_s=-1)
    end_attempt(database, submission_ids[1])

    with database.read() as session:
        attempts = AttemptRepository(session)
        assert [attempt.submission_id for attempt in attempts.expired()] == submission_ids[:1]
        assert [attempt.submission_id for attempt in attempts.live()] == [submission_ids[0], submission_ids[2]]


@pytest.mark.parametrize("end", [status for status in AttemptStatus if status.is_terminal])
def test_an_end_is_final(sqlite_database: Database, end: AttemptStatus) -> None:
    _, submission_id = started(sqlite_database)
    end_attempt(sqlite_database, submission_id, end)
    for to in AttemptStatus:
        with pytest.raises(IllegalTransition):
            end_attempt(sqlite_database, submission_id, to)


def test_later_facts_replace_the_fields_they_set_and_keep_the_rest(database: Database) -> None:
    uid, submission_id = started(database)
    parameters = [
        ParameterFact(index=0, name="w\x00", shape=(2, 3), route=ParameterRoute.MUON, reason="a matrix"),
        ParameterFact(index=1, name="b", shape=(), route=ParameterRoute.ADAMW, reason="a bias"),
    ]
    first = AttemptFacts(
        phases={Phase.IMPORTED: 1.5}, parameters=parameters, ranks=[RankFact(rank=0, node="n", pid=1, device="cpu")],
        momentum_unit=MomentumUnit.UNSCALED, environment={"torch": "2\x00"},
    )  # fmt: skip
    second = AttemptFacts(phases={Phase.FIRST_STEP: 2.5}, environment={"label": "fp16 emulated on CPU"})
    with database.write() as session:
        AttemptRepository(session).add_facts(get_attempt(session, submission_id), first)
    with database.write() as session:
        AttemptRepository(session).add_facts(get_attempt(session, submission_id), second)

    with database.read() as session:
        attempt = get_attempt(session, submission_id)
        found = ParameterRepository(session).list(get_run(session, uid))
    assert attempt.phases == {"imported": 1.5, "first_step": 2.5}
    assert attempt.environment == {"torch": "2\ufffd", "label": "fp16 emulated on CPU"}
    assert attempt.momentum_unit is MomentumUnit.UNSCALED
    assert [rank["node"] for rank in attempt.ranks] == ["n"]
    assert [(row.index, row.name, row.shape, row.route) for row in found] == [
        (0, "w\ufffd", [2, 3], ParameterRoute.MUON), (1, "b", [], ParameterRoute.ADAMW),
    ]  # fmt: skip


@pytest.mark.parametrize("indexes", [(0, 0), (-1, 0), (0, 2**31)])
def test_parameters_that_are_not_numbered_are_refused(sqlite_database: Database, indexes: tuple[int, int]) -> None:
    _, submission_id = started(sqlite_database)
    facts = AttemptFacts(
        parameters=[
            ParameterFact(index=index, name="w", shape=(1,), route=ParameterRoute.MUON, reason="") for index in indexes
        ]
    )
    with pytest.raises(InvalidInput, match="parameter index"), sqlite_database.write() as session:
        AttemptRepository(session).add_facts(get_attempt(session, submission_id), facts)
