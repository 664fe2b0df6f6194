"""The upgrade that has a run's counts end where it came to counts anew what was tried again, and only that."""

from sqlalchemy import text

from service.store.migrate import upgrade
from tests.databases import opened
from tests.records import discarded_record, end_attempt, get_run, insert, start_attempt, started, step_record


def test_an_upgrade_counts_as_the_store_itself_would(empty_url: str) -> None:
    with opened(empty_url) as store:
        upgrade(store, "0008")
        uid, first = started(store)
        insert(store, first, [discarded_record(step) for step in range(10)])
        insert(store, first, [step_record(3)], rank=1)
        end_attempt(store, first)
        second = start_attempt(store, uid, first_step=2)
        insert(store, second, [step_record(step) for step in range(2, 6)])
        end_attempt(store, second)
        start_attempt(store, uid, first_step=4)
        once, its_own = started(store)
        insert(store, its_own, [step_record(0)])
        with store.write() as session:
            # What the store counted before: all of the record; and a figure that shows whether it was counted anew.
            counted = "UPDATE run_summary SET steps = :steps, discarded = :discarded, overflows = :discarded"
            session.execute(text(counted), {"steps": 10, "discarded": 6})

        upgrade(store)

        with store.read() as session:
            of_two, of_one = (get_run(session, each).summary for each in (uid, once))
            assert (of_two.steps, of_two.discarded, of_two.overflows) == (6, 2, 2)
            assert (of_one.steps, of_one.discarded) == (10, 6)
