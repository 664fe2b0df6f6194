"""How much a cold load of the run table transfers, and how soon it is ready, with a thousand runs in the store."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from service.store import migrate
from service.store.runs import RunRepository
from service.store.session import Database
from tests.records import spec
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving

RUNS = 1000
MOST_BYTES = 250 * 1024
READY_S = 1.5
FILTER_S = 0.2

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    launcher = FakeLauncher(gpus=2.0)
    launcher.is_reachable = False  # nothing starts: the table alone is measured
    home: Path = tmp_path_factory.mktemp("weight")
    database = Database(f"sqlite:///{home / 'muonscope.db'}")
    migrate.upgrade(database)
    with database.write() as session:
        for number in range(RUNS):
            ordering = ("master", "ordered")[number % 2]
            RunRepository(session).create(spec(name=f"run-{number:04}", step_ordering=ordering, seed=number))
    database.dispose()
    with serving(home, launcher, wait_until_ready=False) as client:
        yield str(client.base_url).rstrip("/")


def test_a_cold_load_of_a_thousand_runs_is_light_and_soon_ready(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 860})
    session = page.context.new_cdp_session(page)
    received: list[float] = []
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    begun = time.monotonic()
    page.goto(f"{address}/ui/runs", wait_until="commit")
    expect(page.get_by_role("row", name="run-0999")).to_be_visible()
    ready_s = time.monotonic() - begun
    page.wait_for_timeout(500)
    print(f"\ncold load of {RUNS} runs: {sum(received) / 1024:.0f} KiB transferred, ready after {ready_s:.2f} s")
    assert sum(received) <= MOST_BYTES
    assert ready_s <= READY_S

    field = page.get_by_label("Filter runs")
    field.fill("run-0500")
    begun = time.monotonic()
    expect(page.locator(".run-table tbody tr:not(.spacer)")).to_have_count(1)
    filter_s = time.monotonic() - begun
    print(f"filter: {filter_s * 1000:.0f} ms")
    assert filter_s <= FILTER_S
    page.close()
