"""What the pages say to who sees them for the first time: true in both themes, for a finger as for a keyboard."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.web.conftest import Site, Watched, wait_for

Open = Callable[..., Watched]
_FRAME = (
    '  File "/opt/lib/python3.12/site-packages/torch/nn/modules/module.py", line {}, in _call\n    return forward()'
)
_MAP = "document.querySelector('.heat canvas').getBoundingClientRect()"
_OWN = '  File "/home/ada/mine.py", line 7, in loss\n    return self.head(inputs)'


def luminances(page: Page) -> list[float]:
    """How light the surface, the scale's first and its last shade are, 0 to 1."""
    return page.evaluate(
        """() => {
            const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const root = getComputedStyle(document.documentElement);
            const surface = root.getPropertyValue("--surface");
            const shades = getComputedStyle(document.querySelector(".shade-scale i")).backgroundImage
                .match(/(?:color|rgba?)\\([^()]*\\)/g);
            return [surface, shades[0], shades[1]].map((colour) => {
                canvas.fillStyle = surface;
                canvas.fillRect(0, 0, 1, 1);
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).reduce((sum, each) => sum + each) / 765;
            });
        }"""
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_heat_maps_scale_is_drawn_from_its_least_shade_to_its_strongest(
    theme: str, site: Site, open_page: Open
) -> None:
    page = open_page(f"/ui/runs/{site.names['z1-16-ordered']}?view=parameters", theme=theme).page

    expect(page.locator(".shade-scale")).to_be_visible()
    expect(page.locator(".shade-scale")).to_have_text(re.compile(r"^norm 2\.91\s+3\.18, log$"))
    expect(page.get_by_text("darker")).to_have_count(0)
    surface, least, most = luminances(page)
    assert abs(least - surface) < 0.1 < 0.3 < abs(most - surface)
    assert (most > surface) == (theme == "dark")


def test_a_phone_sees_the_heat_map_and_an_edge_that_says_more(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/runs/{site.names['z1-16-ordered']}?view=parameters", width=390, height=844).page

    expect(page.locator(".heat canvas")).to_be_visible()
    wait_for(page, f"{_MAP}.width >= 150 && {_MAP}.left + 150 <= 390")
    table = page.get_by_role("region", name="Momentum norms")
    assert table.evaluate("box => getComputedStyle(box).backgroundAttachment").split(", ")[:3] == [
        "local",
        "local",
        "scroll",
    ]
    page.set_viewport_size({"width": 1280, "height": 800})
    # Counter-test: where all columns have room none is hidden, and the map stands last.
    expect(table.get_by_role("columnheader").last).to_contain_text("step 0")
    wait_for(page, "document.querySelector('.heat').scrollWidth <= document.querySelector('.heat').clientWidth")


def test_a_pair_without_a_step_yet_is_waited_for_and_has_no_axes(site: Site, open_page: Open) -> None:
    ids = [
        site.submit(name=f"to come {ordering}", steps=12, step_ordering=ordering) for ordering in ("master", "ordered")
    ]
    page = open_page(f"/ui/compare?a={ids[0]}&b={ids[1]}").page

    expect(page.get_by_text("Neither run has recorded a step yet.")).to_be_visible()
    expect(page.get_by_text("No steps recorded yet")).to_be_visible()
    expect(page.get_by_text("Nothing to compare")).to_have_count(0)
    expect(page.locator(".panel, .readout")).to_have_count(0)
    first, second = (site.worker(run_id) for run_id in ids)
    first.record(4)
    expect(page.get_by_text("ordered has not recorded a step yet.")).to_be_visible()
    expect(page.locator(".panel").first).to_be_visible()
    second.record(4)
    expect(page.get_by_text("First divergence at step 0.")).to_be_visible()
    expect(page.locator(".readout")).to_be_visible()
    first.finish()
    second.finish()


def test_runs_that_ended_before_a_step_are_not_waited_for(site: Site, open_page: Open) -> None:
    ids = [site.submit(name=f"never came {seed}", seed=seed) for seed in (1, 2)]
    for run_id in ids:
        site.worker(run_id).refuse()
    page = open_page(f"/ui/compare?a={ids[0]}&b={ids[1]}").page

    expect(page.get_by_text("Nothing to compare.", exact=True)).to_be_visible()
    expect(page.get_by_text("These runs ended before the first step")).to_be_visible()


@pytest.mark.parametrize("view", ["", "?view=attempts"])
def test_a_failed_run_shows_ones_own_line_and_all_of_the_message_on_demand(
    view: str, site: Site, open_page: Open
) -> None:
    run_id = site.submit(name="own error", steps=12)
    frames = [_FRAME.format(1), _OWN, *(_FRAME.format(line) for line in range(2, 30))]
    error = "RuntimeError: mat1 and mat2 cannot be multiplied"
    message = "\n".join([error, "Traceback (most recent call last):", *frames, error])
    site.worker(run_id).fail("task_error", message)

    failure = open_page(f"/ui/runs/{run_id}{view}").page.locator(".failure")

    expect(failure.get_by_text("/home/ada/mine.py").first).to_be_in_viewport()
    expect(failure.locator("code").first).to_have_text(error)
    whole = failure.locator("details code")
    expect(whole).to_be_hidden()
    failure.get_by_text("The whole message, 63 lines").click()
    expect(whole).to_have_text(message)


def test_names_that_are_cut_still_differ_in_the_table(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs?q=thirty", width=1440).page
    links = page.locator(".run-table .run-link").filter(has_text="thirty-step")
    expect(links).to_have_count(8)

    expect(
        page.get_by_role("link", name="thirty-step zero_stage=1 initial_power=16 step_ordering=master")
    ).to_be_visible()
    inside = "part => part.getBoundingClientRect().right <= part.closest('td').getBoundingClientRect().right"
    wait_for(page, f"[...document.querySelectorAll('.run-table .stays')].every({inside})")
    shown = {link.locator(".parts").text_content() for link in links.all()}
    assert shown == {f"thirty-step {s} {p} {o}" for s in (1, 2) for p in (16, 0) for o in ("master", "ordered")}
    # Counter-test: where there is room nothing is left out.
    page.goto(f"/ui/compare?a={site.names['z1-16-master']}&b={site.names['z1-16-ordered']}")
    whole = page.locator(".compare-card .parts").first
    expect(whole).to_have_text("thirty-step zero_stage=1 initial_power=16 step_ordering=master")
    whole_too = "[...document.querySelector('.compare-card .parts').children].every"
    wait_for(page, f"{whole_too}(part => part.scrollWidth <= part.clientWidth + 1)")


def test_the_losses_of_a_comparison_say_of_which_steps_they_are(site: Site, open_page: Open) -> None:
    master, ordered = site.names["z1-16-master"], site.names["z1-16-ordered"]
    page = open_page(f"/ui/compare?a={master}&b={ordered}").page
    box = page.locator("section", has=page.get_by_role("heading", name="Loss", exact=True))

    for label in ("Last of attempted steps", "Lowest of applied steps"):
        expect(box.get_by_text(label)).to_be_visible()


def test_logical_gpus_are_called_so_and_others_are_not(site: Site, open_page: Open) -> None:
    page = open_page("/ui/runs").page
    said: dict[str, object] = {"gpus_are_logical": True}
    page.route(f"{site.address}/cluster", lambda route: answer(route, said))

    page.goto("/ui/cluster")
    expect(page.get_by_text("of 8 logical GPUs held")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Logical GPUs in use")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Memory Ray gives out")).to_be_visible()
    for unsaid in (False, None):
        said["gpus_are_logical"] = unsaid
        page.reload()
        expect(page.get_by_text("of 8 GPUs held")).to_be_visible()


def answer(route: Route, more: dict[str, object]) -> None:
    response = route.fetch()
    route.fulfill(response=response, json={**response.json(), **more})


def test_a_finger_is_told_of_no_keys(site: Site, browser: Browser) -> None:
    for has_touch in (True, False):
        context = browser.new_context(
            base_url=site.address, has_touch=has_touch, is_mobile=has_touch, viewport={"width": 820, "height": 800}
        )
        page = context.new_page()
        page.goto("/ui/compare")
        expect(page.get_by_text("Tick their boxes in the run table")).to_be_visible()
        expect(page.get_by_text("from the keyboard")).to_be_visible(visible=not has_touch)
        page.goto(f"/ui/runs/{site.names['z1-16-master']}")
        expect(page.locator(".readout")).to_be_visible()
        expect(page.locator(".hint-line")).to_be_visible(visible=not has_touch)
        context.close()


@pytest.mark.parametrize(
    ("path", "label"),
    [("/ui/runs/gone", "All runs"), ("/ui/experiments/gone", "All experiments"), ("/ui/compare?a=x&b=y", "All runs")],
)
def test_what_is_not_there_leads_to_what_is(path: str, label: str, open_page: Open) -> None:
    page = open_page(path).page
    alert = page.get_by_role("alert")

    expect(alert).to_contain_text("there is no")
    expect(alert).not_to_contain_text("GET /")
    alert.get_by_role("link", name=label).click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_the_forms_help_has_code_for_backticks_and_its_buttons_their_reason(site: Site, open_page: Open) -> None:
    page = open_page("/ui/submit").page
    expect(page.locator(".about code").first).to_be_visible()
    assert "`" not in page.locator("main").inner_text()
    page.get_by_label("zero_stage", exact=True).fill("7")

    buttons = page.locator(".submit-actions")
    expect(buttons.get_by_role("button", name="Submit run")).to_be_disabled()
    expect(buttons.get_by_text("zero_stage must be 3 or less")).to_be_in_viewport()
    page.get_by_label("zero_stage", exact=True).fill("1")
    # Counter-test: where nothing hinders, nothing is said.
    expect(buttons.get_by_role("button", name="Submit run")).to_be_enabled()
    expect(buttons.get_by_role("status")).to_have_text("")
    page.goto("/ui/submit?as=yaml")
    page.get_by_label("Spec as YAML").fill("steps: [3")
    expect(buttons).to_contain_text("The YAML cannot be read yet.")


def test_what_a_list_items_default_gives_is_not_said_to_differ_from_it(site: Site, open_page: Open) -> None:
    run_id = site.submit(name="with a fault", steps=12, faults=[{"kind": "inf", "step": 3}])
    site.worker(run_id).finish()
    page = open_page(f"/ui/runs/{run_id}?view=config").page

    expect(page.get_by_role("row", name="faults[0].step")).to_contain_text("no")
    expect(page.get_by_role("row", name="faults[0].rank")).to_have_count(0)
    page.get_by_role("button", name=re.compile("^All ")).click()
    for field in ("rank", "micro_batch"):
        expect(page.get_by_role("row", name=f"faults[0].{field} 0 0 yes")).to_be_visible()


def test_a_matrix_says_what_of_a_run_is_held_against_what_is_published(site: Site, open_page: Open) -> None:
    page = open_page(f"/ui/experiments/{site.names['experiment']}").page

    expect(page.locator(".lead")).to_contain_text("equal the published figures: outcome, what moved and momentum;")
    expect(page.locator(".lead")).to_contain_text("of the weight motion only whether there is any")
    expect(page.locator(".how")).to_contain_text("equals the published figures as named above")
