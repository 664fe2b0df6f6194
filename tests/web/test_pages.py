"""The dashboard's pages in a browser, on the real application with records of eleven runs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import MARKUP_NAME, Site, Watched

Open = Callable[..., Watched]
PAGES = (
    "runs", "run", "parameters", "config", "attempts", "logs", "compare", "experiments", "experiment", "submit", "yaml",
    "cluster", "unknown",
)  # fmt: skip
AXE = Path(__file__).parents[2] / "service" / "dashboard" / "web" / "node_modules" / "axe-core" / "axe.min.js"


def paths(site: Site) -> dict[str, str]:
    master, ordered = site.names["z1-16-master"], site.names["z1-16-ordered"]
    return {
        "runs": "/ui/runs",
        "run": f"/ui/runs/{master}",
        "parameters": f"/ui/runs/{master}?view=parameters",
        "config": f"/ui/runs/{master}?view=config",
        "attempts": f"/ui/runs/{master}?view=attempts",
        "logs": f"/ui/runs/{master}?view=logs",
        "compare": f"/ui/compare?a={master}&b={ordered}",
        "experiments": "/ui/experiments",
        "experiment": f"/ui/experiments/{site.names['experiment']}",
        "submit": "/ui/submit",
        "yaml": "/ui/submit?as=yaml",
        "cluster": "/ui/cluster",
        "unknown": "/ui/nowhere",
    }


def settle(page: Page) -> None:
    """Wait until the page shows its content instead of a placeholder."""
    expect(page.locator("main")).to_be_visible()
    expect(page.locator(".skeleton")).to_have_count(0)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_speaks_to_its_own_host_only_and_logs_no_error(site: Site, open_page: Open, name: str) -> None:
    watched = open_page(paths(site)[name])
    for width in (1280, 390):
        watched.page.set_viewport_size({"width": width, "height": 800})
        settle(watched.page)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    assert watched.errors == []
    assert watched.hosts == {site.address.removeprefix("http://")}


@pytest.mark.parametrize("name", PAGES)
def test_no_page_has_a_serious_accessibility_violation_in_either_theme(site: Site, open_page: Open, name: str) -> None:
    if not AXE.is_file() and not os.environ.get("CI"):
        pytest.skip("axe-core is not installed: npm --prefix service/dashboard/web ci")
    page = open_page(paths(site)[name]).page
    settle(page)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for theme in ("light", "dark"):
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        assert grave_violations(page) == []
        page.get_by_role("button", name="Use ").click()


def grave_violations(page: Page) -> list[str]:
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in page.evaluate("axe.run()")["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_a_name_that_is_markup_is_text_wherever_it_stands(site: Site, open_page: Open) -> None:
    run, other = site.names["markup"], site.names["z1-16-ordered"]
    for path in (
        "/ui/runs?group=tag",
        f"/ui/runs/{run}",
        f"/ui/runs/{run}?view=config",
        f"/ui/compare?a={run}&b={other}",
        f"/ui/submit?from={run}",
    ):
        watched = open_page(path)
        settle(watched.page)
        if "submit" in path:
            expect(watched.page.get_by_label("name", exact=True).first).to_have_value(MARKUP_NAME)
        else:
            expect(watched.page.get_by_text(MARKUP_NAME).first).to_be_visible()
        assert watched.page.locator("img").count() == 0
        assert watched.dialogs == []


def test_the_table_shows_the_death_and_the_recovery(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=stage:1+scale:>2^8&sort=step_ordering", width=1440).page
    rows = page.locator(".run-table tbody tr:not(.spacer)").filter(has_text="thirty-step")
    expect(rows).to_have_count(2)
    master, ordered = rows.filter(has_text="master").first, rows.filter(has_text="trains")
    for text in ("failed", "dies", "nan since 0", "17"):
        expect(master).to_contain_text(text)
    for text in ("succeeded", "trains", "finite", "30"):
        expect(ordered).to_contain_text(text)


def test_filter_select_and_compare_need_no_mouse(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs").page
    settle(page)
    page.keyboard.press("/")
    page.keyboard.type("stage:1 ")
    page.keyboard.type("scale:>2^8 thirty ")
    expect(page.locator(".run-table tbody tr:not(.spacer)")).to_have_count(2)
    page.keyboard.press("Escape")
    for key in ("j", "x", "j", "x", "c"):
        page.keyboard.press(key)
    expect(page.get_by_text("First divergence at step 0.")).to_be_visible()
    chosen = {site.names["z1-16-master"], site.names["z1-16-ordered"]}
    assert all(run_id in page.url for run_id in chosen)


def test_an_unknown_field_in_the_filter_is_said_beside_it(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=colour:red").page
    expect(page.get_by_role("alert")).to_contain_text("colour is not a field of the search")


def test_a_column_header_sorts_and_the_address_says_so(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs").page
    page.get_by_role("button", name="Overflows").click()
    expect(page.get_by_role("columnheader", name="Overflows")).to_have_attribute("aria-sort", "descending")
    expect(page.locator(".run-table tbody tr:not(.spacer)").first).to_contain_text("dies")
    assert "sort=-overflows" in page.url


def test_the_readout_tells_infinity_from_nan(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/runs/{site.names['z1-16-master']}?step=0").page
    momentum = page.get_by_role("row", name="Momentum norm")
    expect(momentum).to_contain_text("+inf")
    page.keyboard.press("ArrowRight")
    expect(momentum).to_contain_text("nan")
    assert "step=1" in page.url


def test_a_comparison_is_the_same_in_a_second_browser(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z2-16-master"], site.names["z2-16-ordered"]
    first = open_page(f"/ui/compare?a={master}&b={ordered}").page
    expect(first.get_by_text("First divergence at step 0.")).to_be_visible()
    first.keyboard.press("J")
    first.keyboard.press("J")
    second = open_page(first.url.removeprefix(site.address)).page
    expect(second.get_by_role("heading", name="At step 1")).to_be_visible()
    config = second.locator("section", has=second.get_by_role("heading", name="Config"))
    expect(config).to_contain_text("step_ordering")
    expect(config).to_contain_text("1 of")


def test_the_exported_csv_has_the_values_of_the_record(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z1-16-master"], site.names["z1-16-ordered"]
    page = open_page(f"/ui/compare?a={master}&b={ordered}").page
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV, every step").first.click()
    lines = Path(download.value.path()).read_text().splitlines()
    columns = lines[0].split(",")
    norms = [line.split(",")[columns.index("momentum_norm")] for line in lines[1:]]
    assert norms == ["inf", *["nan"] * 16]


def test_the_charts_are_exported_as_one_picture(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z1-16-master"], site.names["z1-16-ordered"]
    page = open_page(f"/ui/compare?a={master}&b={ordered}").page
    expect(page.locator(".panel canvas")).to_have_count(5)
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Charts").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_the_matrix_marks_each_cell_that_equals_what_is_published(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/experiments/{site.names['experiment']}").page
    expect(page.get_by_text("2 of 4")).to_have_count(2)
    expect(page.locator(".matrix .nonfinite")).to_have_count(4)
    expect(page.locator(".matrix .published")).to_have_count(8)


def test_the_heat_map_names_the_step_from_which_a_parameter_is_poisoned(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/runs/{site.names['z1-16-master']}?view=parameters").page
    expect(page.get_by_text("10 parameters").last).to_be_visible()
    expect(page.get_by_role("row", name="linears.4.bias")).to_contain_text("0")


def test_the_queue_says_what_a_run_waits_for(site: Site, open_page: Open) -> None:
    holder = site.submit(name="holds-two", steps=30)
    worker = site.worker(holder)
    waiting = site.submit(name="wants-all", world_size=8, steps=10)
    page = open_page("/ui/cluster").page
    expect(page.get_by_role("row", name="wants-all")).to_contain_text("needs 8 GPUs, 6 free")
    expect(page.get_by_role("row", name="holds-two")).to_contain_text("running")
    site.client.post(f"/runs/{waiting}/stop").raise_for_status()
    worker.finish()
    expect(page.get_by_text("The queue is empty")).to_be_visible()


def test_a_refused_spec_says_which_field_and_what_to_do(site: Site, open_page: Open) -> None:
    page = open_page("/ui/submit").page
    page.get_by_label("world_size", exact=True).fill("64")
    page.get_by_role("button", name="Submit run").click()
    refusal = page.get_by_role("alert").filter(has_text="world_size")
    expect(refusal.first).to_contain_text("64 GPUs")
    page.get_by_label("zero_stage", exact=True).fill("7")
    expect(page.get_by_text("must be 3 or less").first).to_be_visible()
    expect(page.get_by_role("button", name="Submit run")).to_be_disabled()


def test_what_is_written_as_yaml_stands_in_the_form(site: Site, open_page: Open) -> None:
    page = open_page("/ui/submit?as=yaml").page
    page.get_by_label("Spec as YAML").fill("name: by hand\nzero_stage: 2\nloss_scale:\n  initial_power: 20\n")
    page.get_by_role("button", name="Form").click()
    expect(page.get_by_label("zero_stage", exact=True)).to_have_value("2")
    expect(page.get_by_label("initial_power")).to_have_value("20")
    page.get_by_role("button", name="YAML").click()
    expect(page.get_by_label("Spec as YAML")).to_contain_text("initial_power: 20")


def test_the_theme_that_was_chosen_outlives_the_page(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs", theme="light").page
    page.get_by_role("button", name="Use dark colours").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
