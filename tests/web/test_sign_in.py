"""A service that asks for tokens: the page asks for one, and lives on the cookie that it is given."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving
from tests.unit.service.test_access import make_token


def test_the_page_asks_for_a_token_refuses_a_wrong_one_and_is_live_with_a_right_one(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path, FakeLauncher(2.0), require_token=True) as client:
        token = make_token(tmp_path, "submit", "ann")
        proof = {"Authorization": f"Bearer {token}"}
        client.post("/runs", json={"name": "before the sign-in"}, headers=proof).raise_for_status()
        context = browser.new_context(base_url=str(client.base_url))
        page = context.new_page()
        page.goto("/ui/runs")
        page.get_by_label("Token").fill("msc_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("not one of this service")
        assert "before the sign-in" not in page.content()

        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("before the sign-in").first).to_be_visible()
        client.post("/runs", json={"name": "over the live stream"}, headers=proof).raise_for_status()
        expect(page.get_by_text("over the live stream").first).to_be_visible()
        assert token not in page.evaluate("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})")
        context.close()
