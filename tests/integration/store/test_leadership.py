"""Who leads, by a lease in the database, on both databases."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from service.controller.leadership import Leadership, is_gone, this_place
from service.errors import ServiceError
from service.store import leadership
from service.store.events import EventRepository
from service.store.leadership import LeadershipRepository, find_leader
from service.store.models import Leadership as Row
from service.store.session import Database
from service.store.types import read_clock
from tests.databases import fresh_database, opened


def controller(database: Database, port: int, clock: list[float] | None = None) -> Leadership:
    moment = clock if clock is not None else [0.0]
    return Leadership(database, f"http://c:{port}", place=f"elsewhere|ns|{port}|1", clock=lambda: moment[0])


def expire(database: Database) -> None:
    with database.write() as session:
        row = session.get(Row, 1)
        assert row is not None
        row.expires_at = read_clock(session) - timedelta(seconds=1)


def confirms(database: Database, one: Leadership) -> bool:
    with database.write() as session:
        return LeadershipRepository(session).confirm(one.id, one.term)


def test_the_first_to_claim_leads_and_the_second_stands_by(database: Database) -> None:
    first, second = controller(database, 1), controller(database, 2)

    assert (first.claim(), second.claim()) == (True, False)
    assert first.problem is None
    assert second.problem == "standing by: http://c:1 leads"
    assert (first.another_leads, second.another_leads) == (False, True)
    assert first.claim()
    assert first.term == 1


def test_the_leader_is_found_from_outside_while_its_lease_holds(database: Database) -> None:
    url = database.engine.url.render_as_string(hide_password=False)
    assert find_leader(url) is None
    controller(database, 1).claim()

    assert find_leader(url) == "http://c:1"
    expire(database)
    assert find_leader(url) is None


def test_where_no_store_can_be_read_nobody_leads(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database")

    assert find_leader(f"sqlite:///{tmp_path / 'text.db'}") is None
    assert find_leader("mysql://elsewhere/x") is None
    assert find_leader("no address") is None


def test_a_lease_that_ran_out_is_anothers_and_the_old_leader_is_fenced(database: Database) -> None:
    first, second = controller(database, 1), controller(database, 2)
    first.claim()
    second.claim()
    assert confirms(database, first)
    expire(database)

    assert second.claim()

    assert not confirms(database, first)
    assert confirms(database, second)
    assert not first.claim()
    with database.read() as session:
        told = [(event.from_status, event.to_status) for event in EventRepository(session).after()]
    assert told == [(None, first.id), (first.id, second.id)]


def test_a_leader_that_could_not_renew_stops_acting_by_its_own_clock(database: Database) -> None:
    clock = [0.0]
    only = controller(database, 1, clock)
    only.claim()

    clock[0] = 9.0
    assert only.is_leading
    clock[0] = 10.0
    assert not only.is_leading
    assert only.claim()


def test_a_leader_that_gives_up_leaves_the_lead_to_anyone_at_once(database: Database) -> None:
    first, second = controller(database, 1), controller(database, 2)
    first.claim()
    with database.write() as session:
        LeadershipRepository(session).release(first.id)

    assert second.claim()
    assert second.term == 2


def test_a_leader_whose_process_is_gone_is_followed_at_once(database: Database) -> None:
    *machine, _, _ = this_place().split("|")
    gone = Leadership(database, "http://c:1", place="|".join([*machine, "4194000", "1.0"]))
    gone.claim()

    assert controller(database, 2).claim()


def test_only_a_process_of_this_machine_is_ever_proven_gone() -> None:
    *machine, pid, born = this_place().split("|")

    assert not is_gone(this_place())
    assert is_gone("|".join([*machine, pid, str(float(born) - 100)]))
    assert is_gone("|".join([*machine, "4194000", born]))
    assert not is_gone("|".join(["another boot", machine[1], "4194000", born]))
    assert not is_gone("")


def test_workers_are_told_of_every_controller_seen_lately(database: Database) -> None:
    first, second = controller(database, 1), controller(database, 2)
    first.claim()
    second.claim()

    assert second.urls() == "http://c:2,http://c:1"


@pytest.mark.parametrize("look", ["confirms", "claims"])
def test_a_leader_that_is_stopped_in_its_transaction_keeps_nobody_from_the_lead(
    look: str, postgres_url: str, postgres_template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh_database(postgres_url, postgres_template) as url, opened(url) as store, opened(url) as others:
        first, second = controller(store, 1), controller(others, 2)
        assert first.claim()
        expire(others)
        # Longer than a busy machine lets two statements of one transaction wait for each other.
        monkeypatch.setattr(leadership, "IDLE_LIMIT_S", 3.0)
        leads = False
        with suppress(ServiceError, SQLAlchemyError), store.write() as session:
            repository = LeadershipRepository(session)
            if look == "confirms":
                assert repository.confirm(first.id, first.term)
            else:
                repository.claim(first.id, lease_s=0.0)
            # What a stopped process does: nothing, with its locks. The claim waits for them, and gets them.
            leads = second.claim()
            session.execute(select(1))
            raise AssertionError("the stopped one's transaction goes on")

        assert leads
        assert not first.claim()
