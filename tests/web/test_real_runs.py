"""The whole path in a browser: a pair submitted, trained by DeepSpeed under Ray, watched and compared."""

import csv
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import ARGUMENTS, chromium
from tests.web.controller import Controller

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

_RUN_MS = 180_000


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path)
    controller.start()
    yield controller
    if controller.process is not None and controller.process.poll() is None:
        controller.end(signal.SIGTERM)


def test_master_dies_and_ordered_trains_before_the_readers_eyes(controller: Controller, browser: Browser) -> None:
    context = browser.new_context(base_url=controller.address, accept_downloads=True)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto("/ui/submit")
    page.get_by_role("button", name="Submit as pair").click()
    page.evaluate("window.isTheSamePage = true")
    watch_to_the_end(page)
    link = copy_the_link(page)
    assert_the_same_in_a_second_browser(browser, link)
    assert_the_exported_csv_is_the_record(page)

    gone = page.get_by_role("alert").filter(has_text="Disconnected from the controller")
    controller.end(signal.SIGKILL)
    expect(gone).to_be_visible()
    controller.start()
    expect(gone).to_have_count(0)
    expect(page.locator(".compare-card").filter(has_text="ordered")).to_contain_text("trains")
    assert page.evaluate("window.isTheSamePage") is True
    context.close()


def watch_to_the_end(page: Page) -> None:
    """The pair under way, then the death and the recovery, without a reload."""
    cards = page.locator(".compare-card")
    expect(cards).to_have_count(2)
    expect(cards.first).to_contain_text(re.compile("queued|pending|running"))
    # Thirty steps may be over before the page hears that they began: `running` is not waited for.
    expect(cards.filter(has_text="master")).to_contain_text("dies", timeout=_RUN_MS)
    expect(cards.filter(has_text="ordered")).to_contain_text("trains", timeout=_RUN_MS)
    expect(page.get_by_text("First divergence at step 0.")).to_be_visible()
    expect(page.get_by_text("same data, same initial parameters")).to_be_visible()
    expect(page.get_by_text("Steps 0 – 29 of 30")).to_be_visible()
    overflows = page.locator("section", has=page.get_by_role("heading", name="Overflows"))
    expect(overflows.get_by_role("row").nth(1)).to_contain_text("nan enters")
    expect(overflows.get_by_role("row").nth(1)).to_contain_text("kept out")
    assert page.evaluate("window.isTheSamePage") is True


def copy_the_link(page: Page) -> str:
    page.keyboard.press("J")
    expect(page.get_by_role("heading", name="At step 0")).to_be_visible()
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_text("Link copied.")).to_be_visible()
    link: str = page.evaluate("navigator.clipboard.readText()")
    assert link == page.evaluate("window.location.href")
    return link


def assert_the_same_in_a_second_browser(browser: Browser, link: str) -> None:
    other = browser.browser_type.launch(executable_path=chromium(), args=ARGUMENTS)
    second = other.new_page()
    second.goto(link)
    expect(second.get_by_text("First divergence at step 0.")).to_be_visible()
    expect(second.get_by_role("heading", name="At step 0")).to_be_visible()
    other.close()


def assert_the_exported_csv_is_the_record(page: Page) -> None:
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("link", name=re.compile("master.*CSV")).click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert [row["overflow"] for row in rows] == ["true"] * 17
    assert [row["momentum_norm"] for row in rows] == ["nan"] * 17
    assert float(rows[0]["loss_scale_before"]) == 65536.0
