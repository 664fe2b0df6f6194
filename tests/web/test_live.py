"""What the pages show while runs go on, while the controller is away, and when it is back."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import BrowserContext, Route, expect

from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving
from tests.web.conftest import LEASE_S, Site, Watched

Open = Callable[..., Watched]


def test_a_submitted_pair_is_watched_live_until_one_dies_and_one_trains(site: Site, open_page: Open) -> None:
    page = open_page("/ui/submit").page
    page.get_by_label("name", exact=True).first.fill("pair-in-browser")
    page.get_by_role("button", name="Submit as pair").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("pair-in-browser")
    runs = site.client.get("/runs", params={"q": "name~pair-in-browser"}).json()["runs"]
    workers = {run["spec"]["step_ordering"]: site.worker(run["id"]) for run in runs}
    for worker in workers.values():
        worker.record(5)
    cards = page.locator(".compare-card")
    expect(cards.first).to_contain_text("running")
    expect(page.get_by_text("First divergence at step 0.")).to_be_visible()
    for worker in workers.values():
        worker.finish()
    expect(cards.filter(has_text="master")).to_contain_text("dies")
    expect(cards.filter(has_text="ordered")).to_contain_text("trains")
    expect(page.get_by_text("Steps 0 – 29 of 30")).to_be_visible()


def test_a_row_follows_its_run_without_a_reload(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=name~follow-me").page
    expect(page.get_by_text("No run matches")).to_be_visible()
    worker = site.worker(site.submit(name="follow-me", steps=30))
    row = page.get_by_role("row", name="follow-me")
    expect(row).to_be_visible()
    worker.record(12)
    expect(row).to_contain_text("12")
    worker.finish()
    expect(row).to_contain_text("trains")


def test_a_controller_that_goes_and_comes_back_is_followed_without_a_reload(
    tmp_path: Path, browser: object, open_page: Open
) -> None:
    launcher = FakeLauncher(gpus=8.0)
    with ExitStack() as stack:
        client = stack.enter_context(serving(tmp_path, launcher, tick_s=0.05, lease_s=LEASE_S))
        own = Site(client, launcher)
        own.submit(name="before", steps=10)
        page = open_page(f"{own.address}/ui/runs").page
        page.evaluate("window.isTheSamePage = true")
        expect(page.get_by_role("row", name="before")).to_be_visible()
        port = client.base_url.port
        stack.close()
        expect(page.get_by_role("alert")).to_contain_text("Disconnected from the controller")
        expect(page.get_by_role("row", name="before")).to_be_visible()
    with serving(tmp_path, launcher, tick_s=0.05, lease_s=LEASE_S, listen_port=port) as client:
        Site(client, launcher).submit(name="after", steps=10)
        expect(page.get_by_role("row", name="after")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
        assert page.evaluate("window.isTheSamePage") is True


def test_more_tabs_than_a_browser_has_connections_all_load_and_all_follow(site: Site, open_page: Open) -> None:
    tabs = [open_page("/ui/runs?q=name~many-tabs") for _ in range(8)]
    for tab in tabs:
        expect(tab.page.get_by_text("No run matches")).to_be_visible()

    site.submit(name="many-tabs", steps=10)

    for tab in tabs:
        expect(tab.page.get_by_role("row", name="many-tabs")).to_be_visible()
        assert not tab.errors


def test_a_browser_without_shared_workers_follows_by_itself(site: Site, window: BrowserContext) -> None:
    page = window.new_page()
    page.add_init_script("delete window.SharedWorker")
    page.goto("/ui/runs?q=name~by-itself")
    expect(page.get_by_text("No run matches")).to_be_visible()

    site.submit(name="by-itself", steps=10)

    expect(page.get_by_role("row", name="by-itself")).to_be_visible()
    page.close()


def test_what_changed_after_a_page_was_read_and_before_its_stream_began_is_shown(
    site: Site, window: BrowserContext
) -> None:
    page = window.new_page()
    page.add_init_script("delete window.SharedWorker")
    held: list[Route] = []
    page.route("**/events", lambda route: held.append(route))
    page.goto("/ui/runs?q=name~in-between")
    expect(page.get_by_text("No run matches")).to_be_visible()
    site.worker(site.submit(name="in-between", steps=10)).finish()

    for route in held:
        route.continue_()

    expect(page.get_by_role("row", name="in-between")).to_contain_text("trains")
    page.close()
