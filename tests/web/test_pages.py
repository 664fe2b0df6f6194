"""The dashboard's pages in a browser, on the real application with records of eleven runs."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.web.conftest import MARKUP_NAME, Site, Watched, tab, wait_for

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


@pytest.fixture(scope="module", params=PAGES)
def opened(request: pytest.FixtureRequest, window: BrowserContext, site: Site) -> Iterator[Watched]:
    """Each page, opened once for all that holds for every one."""
    with tab(window, paths(site)[request.param]) as watched:
        settle(watched.page)
        yield watched


def test_every_page_fits_speaks_to_its_own_host_only_and_logs_no_error(site: Site, opened: Watched) -> None:
    for width in (390, 1280):
        opened.page.set_viewport_size({"width": width, "height": 800})
        settle(opened.page)
        # Charts follow the window's width a moment later.
        wait_for(opened.page, f"document.documentElement.scrollWidth <= {width}")
    assert opened.errors == []
    assert opened.hosts == {site.address.removeprefix("http://")}


def test_no_page_has_a_serious_accessibility_violation_in_either_theme(opened: Watched) -> None:
    if not AXE.is_file() and not os.environ.get("CI"):
        pytest.skip("axe-core is not installed: npm --prefix service/dashboard/web ci")
    page = opened.page
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


@pytest.mark.parametrize("name", [name for name in PAGES if name != "unknown"])
def test_a_name_that_is_markup_is_text_on_every_page(site: Site, open_page: Open, name: str) -> None:
    run, other, experiment = (site.names[each] for each in ("markup", "other markup", "markup experiment"))
    waiting = site.submit(name=MARKUP_NAME, world_size=8, steps=3, tags=[MARKUP_NAME])
    path = {
        "runs": "/ui/runs?group=tag",
        "compare": f"/ui/compare?a={run}&b={other}",
        "experiment": f"/ui/experiments/{experiment}",
        "submit": f"/ui/submit?from={run}",
        "yaml": f"/ui/submit?from={run}&as=yaml",
    }.get(name) or paths(site)[name].replace(site.names["z1-16-master"], run)
    watched = open_page(path)
    settle(watched.page)
    if name in ("submit", "yaml"):
        field = watched.page.get_by_label("Spec as YAML" if name == "yaml" else "name", exact=True).first
        expect(field).to_have_value(re.compile(re.escape(MARKUP_NAME)))
    else:
        expect(watched.page.get_by_text(MARKUP_NAME).first).to_be_visible()
    assert watched.page.locator("img").count() == 0
    assert watched.dialogs == []
    site.client.post(f"/runs/{waiting}/stop")


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
    # The rows may be those of a beginning of the word: the filter pauses before it asks.
    expect(page).to_have_url(re.compile("thirty"))
    expect(page.locator(".run-table tbody tr:not(.spacer)")).to_have_count(2)
    page.keyboard.press("Escape")
    for key in ("j", "x", "j", "x", "c"):
        page.keyboard.press(key)
    expect(page.get_by_text("First divergence at step 0.")).to_be_visible()
    for run_id in (site.names["z1-16-master"], site.names["z1-16-ordered"]):
        expect(page).to_have_url(re.compile(run_id))


def test_a_long_name_is_cut_in_its_middle_and_said_whole(site: Site, open_page: Open) -> None:
    name = "one gradient overflows and nothing else does step_ordering=deferred"
    run_id = site.submit(name=name, steps=4, step_ordering="deferred")
    site.worker(run_id).finish()

    page = open_page(f"/ui/runs?q=id:{run_id}").page
    link = page.get_by_role("link", name=name)

    expect(link).to_have_attribute("title", name)
    head, tail = link.locator(".gives").first, link.locator(".stays").last
    expect(tail).to_have_text("deferred")
    expect(head).to_be_visible()
    cut = "document.querySelector('.run-table .gives')"
    wait_for(page, f"{cut}.scrollWidth > {cut}.clientWidth")
    inner = "[...document.querySelectorAll('.run-table .stays')].at(-1)"
    wait_for(page, f"{inner}.getBoundingClientRect().right <= {inner}.closest('td').getBoundingClientRect().right")


def test_the_segments_count_the_runs_that_the_filter_finds(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=thirty").page
    segments = page.get_by_role("group", name="Which runs")
    expect(segments).to_contain_text("All 8")
    expect(segments).to_contain_text("Failed 2")
    expect(segments).to_contain_text("Died 2")
    expect(segments).to_contain_text("Trains 6")
    segments.get_by_role("button", name="Died").click()
    expect(page.locator(".run-table tbody tr:not(.spacer)")).to_have_count(2)
    expect(page.get_by_text("2 runs", exact=True)).to_be_visible()
    expect(segments).to_contain_text("All 8")


def test_selected_runs_are_tagged_together_and_found_by_the_tag(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=thirty+ordering:master").page
    page.get_by_role("checkbox", name="Select all loaded runs").click()
    page.get_by_role("button", name="Tag", exact=True).click()
    page.get_by_label("Tag for the selected runs").fill("night run")
    page.keyboard.press("Enter")
    expect(page.get_by_text("4 of 4")).to_be_visible()
    found = site.client.get("/runs", params={"q": 'tag:"night run"'}).json()["runs"]
    assert {run["spec"]["step_ordering"] for run in found} == {"master"}
    assert len(found) == 4
    page.get_by_role("button", name="Take tag night run off").click()
    expect(page.get_by_text("None of them carries a tag.")).to_be_visible()
    assert site.client.get("/runs", params={"q": 'tag:"night run"'}).json()["runs"] == []


def test_what_can_be_done_with_selected_runs_is_within_a_narrow_window(site: Site, open_page: Open) -> None:
    selected = f"{site.names['z1-16-master']},{site.names['z1-16-ordered']}"
    page = open_page(f"/ui/runs?selected={selected}", width=390).page
    bar = page.get_by_role("region", name="Selected runs")
    bar.get_by_role("button", name="Tag", exact=True).click()
    expect(page.get_by_label("Tag for the selected runs")).to_be_visible()
    assert bar.get_by_role("button").count() > 3
    controls = ".selection-bar button, .selection-bar input"
    boxes = f"[...document.querySelectorAll('{controls}')].map(control => control.getBoundingClientRect())"
    wait_for(page, f"{boxes}.every(box => box.width > 0 && box.left >= 0 && box.right <= 390)")


def test_an_unknown_field_in_the_filter_is_said_beside_it(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=colour:red").page
    expect(page.get_by_role("alert")).to_contain_text("colour is not a field of the search")


def test_a_column_header_sorts_and_the_address_says_so(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs").page
    page.get_by_role("button", name="Overflows").click()
    expect(page.get_by_role("columnheader", name="Overflows")).to_have_attribute("aria-sort", "descending")
    expect(page.locator(".run-table tbody tr:not(.spacer)").first).to_contain_text("dies")
    expect(page).to_have_url(re.compile("sort=-overflows"))


def test_the_readout_tells_infinity_from_nan(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/runs/{site.names['z1-16-master']}?step=0").page
    momentum = page.get_by_role("row", name="Momentum norm")
    expect(momentum).to_contain_text("+inf")
    page.keyboard.press("ArrowRight")
    expect(momentum).to_contain_text("nan")
    expect(page).to_have_url(re.compile("step=1"))


def test_a_comparison_is_the_same_in_a_second_browser(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z2-16-master"], site.names["z2-16-ordered"]
    first = open_page(f"/ui/compare?a={master}&b={ordered}").page
    expect(first.get_by_text("First divergence at step 0.")).to_be_visible()
    # The key goes from overflow to overflow of the steps, which are read apart from the comparison.
    expect(first.get_by_text("Steps 0 – 29 of 30")).to_be_visible()
    first.keyboard.press("J")
    first.keyboard.press("J")
    first.wait_for_url("**step=1*")
    second = open_page(first.url.removeprefix(site.address), apart=True).page
    expect(second.get_by_role("heading", name="At step 1")).to_be_visible()
    config = second.locator("section", has=second.get_by_role("heading", name="Config"))
    expect(config).to_contain_text("step_ordering")
    expect(config).to_contain_text("1 of")


@pytest.mark.parametrize("orderings", [("per_tensor", "ordered"), ("ordered", "ordered")], ids=["two", "one"])
def test_the_values_of_a_pair_and_their_difference_fit_beside_the_charts(
    orderings: tuple[str, str], site: Site, open_page: Open
) -> None:
    ids = []
    for ordering, begin in zip(orderings, ("a pair whose names", "another whose names"), strict=True):
        ids.append(site.submit(name=f"{begin} are long {ordering}", steps=12, step_ordering=ordering))
        site.worker(ids[-1]).finish()
    page = open_page(f"/ui/compare?a={ids[0]}&b={ids[1]}").page
    page.set_viewport_size({"width": 1280, "height": 900})
    expect(page.locator(".readout td").first).not_to_have_text("—")
    expect(page.locator(".readout tbody tr").first.locator("td").last).not_to_have_text("—")

    box = "document.querySelector('.readout')"
    wait_for(page, f"{box}.scrollWidth <= {box}.clientWidth")


def test_momentum_norms_of_two_units_have_a_chart_each_that_says_its_unit(site: Site, open_page: Open) -> None:
    spec = {"steps": 12, "zero_stage": 2, "loss_scale": {"initial_power": 12}}
    native = site.submit(name="native", implementation="deepspeed", step_ordering="deferred", **spec)
    ours = site.submit(name="ours", **spec)
    for run_id in (native, ours):
        site.worker(run_id).finish()
    page = open_page(f"/ui/compare?a={native}&b={ours}", width=1440).page
    charts = page.locator(".panel", has=page.get_by_role("heading", name="Momentum norm"))

    expect(charts).to_have_count(2)
    expect(charts.nth(0)).to_contain_text("deferred")
    expect(charts.nth(0)).to_contain_text("the norm of Muon's momentum times the loss scale")
    expect(charts.nth(1)).to_contain_text("ordered")
    expect(charts.nth(1)).to_contain_text("the norm of Muon's momentum")
    expect(charts.nth(1)).not_to_contain_text("loss scale")
    expect(charts.locator("canvas")).to_have_count(2)
    # Counter-test: norms of one unit share their axis.
    page.goto(f"/ui/compare?a={ours}&b={site.names['z1-0-ordered']}")
    expect(page.locator(".readout td").first).not_to_have_text("—")
    expect(charts).to_have_count(1)


def test_each_side_of_a_comparison_has_its_name_and_id(site: Site, open_page: Open) -> None:
    ids = [site.names["z1-16-master"], site.names["z1-16-ordered"]]
    cards = open_page(f"/ui/compare?a={ids[0]}&b={ids[1]}").page.locator(".compare-card")
    expect(cards).to_have_count(2)
    for card, run_id in zip(cards.all(), ids, strict=True):
        name = site.client.get(f"/runs/{run_id}").json()["name"]
        expect(card.get_by_role("link", name=name)).to_have_attribute("href", f"/ui/runs/{run_id}")
        expect(card).to_contain_text(run_id)


def test_of_several_runs_each_is_held_against_the_first(site: Site, open_page: Open) -> None:
    names = ("z1-16-ordered", "z2-16-ordered", "z1-16-master", "z1-0-ordered")
    query = "&".join(f"{letter}={site.names[name]}" for letter, name in zip("abcd", names, strict=True))
    page = open_page(f"/ui/compare?{query}", width=1440).page
    against = page.locator(".against li")
    expect(against).to_have_count(3)
    expect(against.nth(0)).to_contain_text("Bit-equal until step 30.")
    expect(against.nth(1)).to_contain_text("First divergence at step 0.")
    config = page.locator("section", has=page.get_by_role("heading", name="Config"))
    for field in ("zero_stage", "step_ordering", "loss_scale.initial_power"):
        expect(config).to_contain_text(field)
    overflows = page.locator("section", has=page.get_by_role("heading", name="Overflows"))
    expect(overflows.get_by_role("row").nth(1)).to_contain_text("kept out")
    expect(overflows.get_by_role("row").nth(1)).to_contain_text("+inf enters")


def test_over_applied_steps_discarded_ones_take_no_room(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z1-16-master"], site.names["z1-16-ordered"]
    page = open_page(f"/ui/compare?a={master}&b={ordered}").page
    expect(page.get_by_text("Steps 0 – 29 of 30")).to_be_visible()
    page.get_by_role("button", name="Applied").click()
    expect(page.get_by_text("Steps 0 – 27 of 28")).to_be_visible()
    expect(page).to_have_url(re.compile("x=applied"))


def test_smoothing_leaves_the_raw_line_and_the_address_keeps_it(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z1-16-master"], site.names["z1-16-ordered"]
    page = open_page(f"/ui/compare?a={master}&b={ordered}&smooth=0.9").page
    expect(page.get_by_role("slider", name="Smooth")).to_have_value("0.9")
    expect(page.get_by_text("The raw line stays")).to_be_visible()


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


def test_a_run_that_failed_before_it_proved_anything_has_failed_in_the_matrix(site: Site, open_page: Open) -> None:
    body = {"name": "refused", "base": {"world_size": 2}, "matrix": {"seed": [1]}}
    made = site.client.post("/experiments", json=body).json()
    site.worker(made["runs"][0]["id"]).refuse()

    outcome = open_page(f"/ui/experiments/{made['id']}").page.locator("a.outcome")

    expect(outcome).to_have_text("failedconfiguration refused")


def test_an_experiment_of_ones_own_shows_each_runs_loss_and_which_runs_were_stopped(
    site: Site, open_page: Open
) -> None:
    body = {
        "name": "rates",
        "base": {"world_size": 2, "steps": 4},
        "matrix": {"step_ordering": ["master", "ordered"], "optimizer.lr": [0.01, 0.02]},
    }
    made = site.client.post("/experiments", json=body).json()
    *finished, stopped = made["runs"]
    for run in finished:
        site.worker(run["id"]).finish()
    site.client.post(f"/runs/{stopped['id']}/stop").raise_for_status()
    page = open_page(f"/ui/experiments/{made['id']}").page
    table = page.get_by_role("region", name="Results")

    expect(table.get_by_role("columnheader", name="Last loss")).to_be_visible()
    loss = site.client.get(f"/runs/{finished[0]['id']}").json()["summary"]["last_loss"]
    expect(table.locator("tbody tr").first.locator("td").last).to_contain_text(f"{loss:.3f}"[:4])
    expect(page.get_by_text("and 1 was stopped")).to_be_visible()
    expect(open_page("/ui/experiments").page.get_by_role("link", name="rates")).to_contain_text("1 stopped")


def test_a_matrix_has_all_its_columns_in_view_or_an_edge_that_says_there_are_more(site: Site, open_page: Open) -> None:
    made = site.client.post("/experiments", json={"builtin": "gradient-accumulation"}).json()
    for run in made["runs"]:
        site.worker(run["id"]).finish()
    page = open_page(f"/ui/experiments/{made['id']}").page
    table = page.get_by_role("region", name="Results")
    expect(table.get_by_text("trains")).to_have_count(4)
    aside = page.get_by_role("complementary", name="About the selected pair")
    for width in (1440, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth"), width
        assert aside.evaluate("box => box.scrollWidth <= box.clientWidth"), width

    page.set_viewport_size({"width": 390, "height": 900})

    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    # Two shadows that stay at the edges, under two plates that move with the columns.
    attached = table.evaluate("box => getComputedStyle(box).backgroundAttachment.split(', ')")
    assert attached[:4] == ["local", "local", "scroll", "scroll"]
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"/ui/experiments/{site.names['experiment']}")
    # Counter-test: where there is room the boxes stay beside the table.
    expect(table.get_by_text("trains").first).to_be_visible()
    beside, box = aside.bounding_box(), table.bounding_box()
    assert beside is not None
    assert box is not None
    assert beside["x"] >= box["x"] + box["width"]


def test_many_orderings_have_a_row_each_and_are_compared_together(site: Site, open_page: Open) -> None:
    orderings = ["master", "per_tensor", "ordered"]
    body = {
        "name": "three",
        "base": {"world_size": 2, "steps": 4},
        "matrix": {"step_ordering": orderings, "seed": [1, 2]},
    }
    made = site.client.post("/experiments", json=body).json()
    for run in made["runs"]:
        site.worker(run["id"]).finish()
    page = open_page(f"/ui/experiments/{made['id']}").page
    table = page.get_by_role("region", name="Results")

    rows = table.locator("tbody tr")
    expect(rows).to_have_count(6)
    expect(rows.nth(0)).to_contain_text("master")
    expect(rows.nth(2)).to_contain_text("ordered")
    for row in range(3):
        expect(rows.nth(row)).to_have_class("selected")
    rows.nth(4).locator("td").last.click()
    expect(rows.nth(3)).to_have_class("selected new-group")
    expect(rows.nth(0)).not_to_have_class("selected")
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("/ui/compare"))
    for run in made["runs"]:
        if run["spec"]["seed"] == 2:
            expect(page).to_have_url(re.compile(run["id"]))


def test_the_heat_map_names_the_step_from_which_a_parameter_is_poisoned(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/runs/{site.names['z1-16-master']}?view=parameters").page
    expect(page.get_by_text("10 parameters").last).to_be_visible()
    expect(page.get_by_role("row", name="linears.4.bias")).to_contain_text("0")


def test_what_a_run_emulates_stands_beside_its_name_on_each_of_its_views(site: Site, open_page: Open) -> None:
    for view in ("", "?view=config"):
        page = open_page(f"/ui/runs/{site.names['z1-16-master']}{view}").page
        expect(page.locator(".run-title")).to_contain_text("scripted emulation")


def test_the_load_of_each_rank_stands_on_the_axis_of_the_steps(site: Site, open_page: Open) -> None:
    run_id = site.submit(name="busy", steps=30)
    worker = site.worker(run_id)
    worker.record(30)
    worker.report_load(time.time())
    worker.finish()
    page = open_page(f"/ui/runs/{run_id}?step=5").page
    expect(page.locator(".panel", has_text="GPU memory").locator("canvas")).to_be_visible()
    box = page.get_by_role("region", name="System load")
    expect(box.get_by_role("row", name="1", exact=False).last).to_contain_text("80 % · 80 %")
    expect(box).to_contain_text("Rank 0's whole node: 50 % CPU, 8.0 GiB in use of its 64 GiB of memory.")
    page.goto(f"/ui/runs/{run_id}?step=0")
    expect(box.get_by_role("row").last).to_contain_text("75 % · 80 %")
    page.get_by_role("button", name="System load").click()
    expect(page.locator(".panel", has_text="GPU memory")).to_have_count(0)


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


def test_fields_that_do_not_go_together_are_said_while_one_types(site: Site, open_page: Open) -> None:
    page = open_page("/ui/submit").page
    page.get_by_label("implementation", exact=True).select_option("deepspeed")
    page.get_by_label("step_ordering", exact=True).select_option("ordered")
    refusal = page.get_by_role("alert").filter(has_text="ordered")
    expect(refusal.first).to_be_visible()
    before = len(site.client.get("/runs", params={"limit": 1000}).json()["runs"])
    page.get_by_label("step_ordering", exact=True).select_option("master")
    expect(refusal).to_have_count(0)
    assert len(site.client.get("/runs", params={"limit": 1000}).json()["runs"]) == before


def test_yaml_that_cannot_be_read_is_not_submitted_as_what_it_was_before(site: Site, open_page: Open) -> None:
    page = open_page("/ui/submit?as=yaml").page
    editor = page.get_by_label("Spec as YAML")
    editor.fill("steps: [3")
    expect(page.get_by_role("button", name="Submit run")).to_be_disabled()
    editor.fill("steps: 3\n")
    expect(page.get_by_role("button", name="Submit run")).to_be_enabled()


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
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
