import base64
import contextlib
import json
from collections.abc import Callable

import pytest

from muonscope.contract.attempts import Failure
from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import FailureKind, RunStatus, Verdict
from service.controller.transitions import LEGAL
from service.errors import Conflict, IllegalTransition, InvalidInput, NotFound
from service.store.events import EventRepository
from service.store.experiments import ExperimentRepository
from service.store.queue import QueueRepository
from service.store.runs import SORTABLE, RunRepository
from service.store.session import Database
from tests.records import get_run, insert, queue_run, spec, started, step_record


def _names(database: Database, **query: object) -> list[str]:
    with database.read() as session:
        return [run.name for run in RunRepository(session).list(**query).runs]  # type: ignore[arg-type]


def test_a_run_is_created_once_for_each_key_and_refused_for_another_spec(database: Database) -> None:
    with database.write() as session:
        first, is_new = RunRepository(session).create(spec(), idempotency_key="k")
    with database.write() as session:
        repeat, is_repeat_new = RunRepository(session).create(spec(), idempotency_key="k")
        with pytest.raises(Conflict, match=first.uid):
            RunRepository(session).create(spec(seed=1), idempotency_key="k")
        other, _ = RunRepository(session).create(spec(), idempotency_key="another")

    assert (is_new, is_repeat_new, repeat.uid) == (True, False, first.uid)
    assert other.uid != first.uid
    assert len(_names(database)) == 2


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_that_is_none_is_refused(sqlite_database: Database, key: str) -> None:
    with pytest.raises(InvalidInput), sqlite_database.write() as session:
        RunRepository(session).create(spec(), idempotency_key=key)


def test_a_stored_spec_reads_back_as_the_one_that_was_sent(database: Database) -> None:
    sent = spec(tags=["night run", "ü"], notes="line\nbreak", ds_config={"wall_clock_breakdown": True})
    uid = queue_run(database, sent)

    with database.read() as session:
        run = get_run(session, uid)
        assert RunSpec.model_validate(run.spec) == sent
        assert run.fingerprint == sent.fingerprint()
        assert [tag.tag for tag in run.tags] == ["night run", "ü"]


def test_a_spec_that_leaves_clipping_to_deepspeed_can_be_read_back(sqlite_database: Database) -> None:
    sent = spec(implementation="deepspeed", step_ordering="deferred", gradient_clipping=1.0)
    uid = queue_run(sqlite_database, sent)

    with sqlite_database.read() as session:
        assert RunSpec.model_validate(get_run(session, uid).spec).clip_scope == "update"


def test_an_unknown_id_is_not_found(database: Database) -> None:
    with pytest.raises(NotFound), database.read() as session:
        RunRepository(session).get("nope\x00")


@pytest.mark.parametrize("origin", list(RunStatus))
def test_only_legal_changes_of_status_happen(sqlite_database: Database, origin: RunStatus) -> None:
    anything = {status: set(RunStatus) for status in RunStatus}
    changed = set()
    for to in RunStatus:
        uid = queue_run(sqlite_database)
        with sqlite_database.write() as session:
            RunRepository(session).set_status(get_run(session, uid), origin, legal=anything, who="t", why="set up")
        with contextlib.suppress(IllegalTransition), sqlite_database.write() as session:
            RunRepository(session).set_status(get_run(session, uid), to, legal=LEGAL, who="t", why="t")
            changed.add(to)
        with sqlite_database.read() as session:
            assert get_run(session, uid).status is (to if to in LEGAL[origin] else origin)

    assert changed == LEGAL[origin]


def test_a_change_of_status_leaves_who_and_why(database: Database) -> None:
    uid = queue_run(database)
    failure = Failure(kind=FailureKind.CONFIG_REFUSED, message="no\x00such task")
    with database.write() as session:
        runs = RunRepository(session)
        run = runs.get(uid)
        runs.set_status(run, RunStatus.PENDING, legal=LEGAL, who="t", why="t")
        runs.set_status(run, RunStatus.FAILED, legal=LEGAL, who="controller", why="refused", failure=failure)

    with database.read() as session:
        run = get_run(session, uid)
        event = EventRepository(session).after(0, run=run)[-1]
    assert (event.from_status, event.to_status, event.who, event.why) == ("pending", "failed", "controller", "refused")
    assert run.failure_kind is FailureKind.CONFIG_REFUSED
    assert run.failure_message == "no\ufffdsuch task"
    assert run.finished_at is not None
    assert run.finished_at.tzinfo is not None


def test_a_run_queued_again_is_as_new(database: Database) -> None:
    uid = queue_run(database)
    with database.write() as session:
        runs = RunRepository(session)
        run = runs.get(uid)
        runs.request_stop(run, who="test")
        runs.set_status(run, RunStatus.PENDING, legal=LEGAL, who="t", why="t")
        failure = Failure(kind=FailureKind.JOB_LOST)
        runs.set_status(run, RunStatus.FAILED, legal=LEGAL, who="t", why="t", failure=failure)
        runs.set_findings(run, [{"name": "inconclusive", "step": None, "parameter": None, "evidence": "e"}])
        runs.set_status(run, RunStatus.QUEUED, legal=LEGAL, who="t", why="t")

    with database.read() as session:
        run = get_run(session, uid)
    assert (run.failure_kind, run.verdict, run.findings, run.stop_requested, run.finished_at) == (
        None, None, [], False, None,
    )  # fmt: skip


def test_the_gravest_verdict_is_the_runs_and_all_findings_are_kept(database: Database) -> None:
    uid = queue_run(database)
    findings = [
        {"name": "dies", "step": 17, "parameter": "w", "evidence": "because"},
        {"name": "stalled", "step": None, "parameter": None, "evidence": "also"},
        {"name": "loss_rose", "step": 3, "parameter": None, "evidence": "a little"},
    ]
    with database.write() as session:
        RunRepository(session).set_findings(get_run(session, uid), findings)

    with database.read() as session:
        run = get_run(session, uid)
    assert (run.verdict, run.verdict_step, run.verdict_parameter) == (Verdict.DIES, 17, "w")
    assert run.findings == findings


def test_the_queue_is_by_priority_then_age(database: Database) -> None:
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        queue_run(database, spec(name=name, priority=priority))

    with database.read() as session:
        runs = RunRepository(session)
        queued = runs.queued()
        positions = runs.queue_positions(queued[2:])
        assert [run.name for run in queued] == ["b", "c", "a", "d"]
        assert [run.name for run in runs.queued(limit=1)] == ["b"]
        assert positions == {queued[2].uid: 3, queued[3].uid: 4}
        assert runs.count_by_status()[RunStatus.QUEUED] == 4


def _searchable(database: Database) -> None:
    queue_run(database, spec(name="Tiny GPT 100%", tags=["night run"], zero_stage=2))
    queue_run(database, spec(name="tiny_linear", step_ordering="master", loss_scale={"initial_power": 0}, steps=30))
    queue_run(database, spec(name="Größe ÄÖÜ"))
    queue_run(database, spec(name="big", implementation="deepspeed", step_ordering="deferred", precision="bf16"))


SEARCHES = [
    ("", {"Tiny GPT 100%", "tiny_linear", "big", "Größe ÄÖÜ"}),
    ("tiny", {"Tiny GPT 100%", "tiny_linear"}),
    ("gpt TINY", {"Tiny GPT 100%"}),
    ("100%", {"Tiny GPT 100%"}),
    ("tiny_", {"tiny_linear"}),
    ("y_l", {"tiny_linear"}),
    ('"tiny gpt"', {"Tiny GPT 100%"}),
    ("name~lin", {"tiny_linear"}),
    ("größe", {"Größe ÄÖÜ"}),
    ("GRÖ äöü", {"Größe ÄÖÜ"}),
    ("name~ö,big", {"Größe ÄÖÜ", "big"}),
    ("ö%", set()),
    ("task:,simple_model, id:x,", set()),
    ("ordering:master", {"tiny_linear"}),
    ("ordering:master,deferred", {"tiny_linear", "big"}),
    ("impl:deepspeed", {"big"}),
    ("stage:2", {"Tiny GPT 100%"}),
    ("scale:>=2^16 name~tiny", {"Tiny GPT 100%"}),
    ("scale:<2", {"tiny_linear"}),
    ("scale:1", {"tiny_linear"}),
    ("steps:<=30", {"tiny_linear"}),
    ('tag:"night run"', {"Tiny GPT 100%"}),
    ("tag:night", set()),
    ("status:queued,failed", {"Tiny GPT 100%", "tiny_linear", "big", "Größe ÄÖÜ"}),
    ("status:failed", set()),
    ("verdict:dies", set()),
    ("overflows:0", {"Tiny GPT 100%", "tiny_linear", "big", "Größe ÄÖÜ"}),
    ("' OR 1=1 --", set()),
    ("\x00", set()),
    ("id:\x00", set()),
    ("tag:\x00", set()),
    ("experiment:x fingerprint:\x00", set()),
]


def test_the_search_finds_what_it_says(database: Database) -> None:
    _searchable(database)

    assert {query: set(_names(database, q=query)) for query, _ in SEARCHES} == dict(SEARCHES)


def test_an_id_as_a_word_finds_its_run_and_what_is_called_so(database: Database) -> None:
    _searchable(database)
    uid = queue_run(database, spec(name="found"))
    queue_run(database, spec(name=f"clone of {uid}"))

    assert set(_names(database, q=uid)) == {"found", f"clone of {uid}"}
    assert set(_names(database, q=f"{uid} stage:1 clone")) == {f"clone of {uid}"}
    # Counter-test: less than an id is text of a name alone.
    assert set(_names(database, q=uid[:-1])) == {f"clone of {uid}"}


@pytest.mark.parametrize(
    ("query", "remedy"),
    [
        ("colour:red", "ordering"),
        ("status:done", "succeeded"),
        ("scale:big", "2^16"),
        ("scale:>=2^9999", "2^16"),
        ("scale:1e400", "2^16"),
        ("steps:" + "9" * 30, "2^16"),
        ('"open', "close"),
        ("status:", "status:value"),
        ("tag:,", "tag:value"),
        ("x" * 1001, "1000"),
    ],
)
def test_a_search_that_cannot_be_understood_says_what_can(sqlite_database: Database, query: str, remedy: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _names(sqlite_database, q=query)
    assert caught.value.field == "q"
    assert remedy in (caught.value.remedy or "")


def _paged(database: Database, sort: str) -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    with database.read() as session:
        while True:
            page = RunRepository(session).list(sort=sort, cursor=cursor, limit=2)
            found += [run.uid for run in page.runs]
            cursor = page.next_cursor
            if cursor is None:
                return found


def test_pages_follow_one_another_in_any_order_with_missing_values_last(database: Database) -> None:
    uids = [queue_run(database, spec(name=f"run {index % 3}", precision="fp16")) for index in range(5)]
    uids += [queue_run(database, spec(name="plain", precision="fp32"))]
    with database.write() as session:
        for index, uid in enumerate(uids[:4]):
            run = get_run(session, uid)
            run.summary.last_loss = index / 3
            run.started_at = run.created_at if index % 2 else None
            run.summary.parameters_moved = index % 2

    for sort in [sign + key for key in SORTABLE for sign in ("", "-")]:
        with database.read() as session:
            whole = [run.uid for run in RunRepository(session).list(sort=sort).runs]
        assert sorted(whole) == sorted(uids)
        assert _paged(database, sort) == whole, sort
    assert _paged(database, "last_loss") == uids
    assert _paged(database, "-last_loss") == [*uids[3::-1], uids[5], uids[4]]


def test_a_page_is_not_shifted_by_runs_that_arrive_meanwhile(database: Database) -> None:
    uids = [queue_run(database) for _ in range(4)]
    with database.read() as session:
        first = RunRepository(session).list(limit=2)
    queue_run(database)
    with database.read() as session:
        second = RunRepository(session).list(limit=2, cursor=first.next_cursor)

    assert [run.uid for run in [*first.runs, *second.runs]] == uids[::-1]


@pytest.mark.parametrize(
    ("sort", "value"),
    [
        ("zero_stage", 2**64),
        ("last_loss", 2**64),
        ("status", 2**64),
        ("created_at", "0001-01-01T00:00:00+23:00"),
        ("created_at", "9999-12-31T23:59:59-23:00"),
    ],
)
def test_a_cursor_that_holds_what_no_row_can_is_refused(sqlite_database: Database, sort: str, value: int | str) -> None:
    kind = "at" if isinstance(value, str) else "is"
    cursor = base64.urlsafe_b64encode(json.dumps([sort, kind, value, 1]).encode()).decode()

    with pytest.raises(InvalidInput, match="cursor"):
        _names(sqlite_database, sort=sort, cursor=cursor)


@pytest.mark.parametrize(
    "cursor",
    ["", "%%", "bm9uZQ==", "WyItY3JlYXRlZF9hdCIsICJpcyIsIDEsIDFd", "é", "[" * 3000],
)
def test_a_cursor_that_is_none_is_refused(sqlite_database: Database, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        _names(sqlite_database, cursor=cursor)


@pytest.mark.parametrize("query", [{"sort": "name;drop"}, {"sort": "-"}, {"limit": 0}, {"limit": 1001}])
def test_a_sort_or_limit_that_is_none_is_refused(sqlite_database: Database, query: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        _names(sqlite_database, **query)


@pytest.mark.parametrize(
    "change",
    [
        lambda runs, run: QueueRepository(runs._session).set_reasons({run.id: "needs 8 GPUs"}),
        lambda runs, run: runs.request_stop(run, who="test"),
        lambda runs, run: runs.set_status(run, RunStatus.PENDING, legal=LEGAL, who="t", why="t"),
    ],
)
def test_a_live_view_sees_each_change_once(sqlite_database: Database, change: Callable[..., None]) -> None:
    queue_run(sqlite_database)
    uid = queue_run(sqlite_database)
    with sqlite_database.write() as session:
        runs = RunRepository(session)
        seen = runs.last_revision()
        change(runs, runs.get(uid))

    with sqlite_database.read() as session:
        runs = RunRepository(session)
        assert [run.uid for run in runs.changed_after(seen)] == [uid]
        assert runs.changed_after(runs.last_revision()) == []


def test_stored_steps_are_a_change_too(sqlite_database: Database) -> None:
    uid, submission_id = started(sqlite_database)
    with sqlite_database.read() as session:
        seen = RunRepository(session).last_revision()
    insert(sqlite_database, submission_id, [step_record(0)])

    with sqlite_database.read() as session:
        assert [run.uid for run in RunRepository(session).changed_after(seen)] == [uid]


def test_an_experiment_keeps_its_runs_in_the_order_of_its_matrix(database: Database) -> None:
    with database.write() as session:
        experiment = ExperimentRepository(session).create(
            "e", [spec(name=name) for name in "cab"], base={"steps": 1}, matrix={"name": ["c", "a", "b"]}
        )
        uid = experiment.uid
    queue_run(database)

    with database.read() as session:
        experiments = ExperimentRepository(session)
        found = experiments.get(uid)
        assert [run.name for run in experiments.runs(found)] == ["c", "a", "b"]
        assert [experiment.uid for experiment in experiments.list()] == [uid]
        assert len(RunRepository(session).list(q=f"experiment:{uid}").runs) == 3
        with pytest.raises(NotFound):
            experiments.get("none")
