"""Take the pictures in docs/screenshots: each page, light and dark, from runs that were trained for them.

    python -m tests.web.screenshots [--url http://127.0.0.1:8800] [--only compare]

Without --url a service of its own is started, the published experiment trained, and the service ended. With it, a
service that has this experiment is looked at as it is.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final

import httpx
from playwright.sync_api import Browser, Page, expect

from tests.browser import launched
from tests.web.controller import Controller

OUT: Final = Path(__file__).parents[2] / "docs" / "screenshots"
MOST_BYTES: Final = 300 * 1024
WIDTH, HEIGHT = 1440, 960
_TRAIN_S: Final = 600.0


@dataclass(frozen=True)
class Shot:
    name: str
    path: str
    shows: str
    """A selector whose first match must be visible before the picture is taken."""
    height: int = HEIGHT


def shots(experiment: dict[str, Any]) -> list[Shot]:
    """The pages, by the runs of the thirty-step experiment."""
    runs = {
        (run["spec"]["zero_stage"], run["spec"]["loss_scale"]["initial_power"], run["spec"]["step_ordering"]): run["id"]
        for run in experiment["runs"]
    }
    master, ordered = runs[1, 16, "master"], runs[1, 16, "ordered"]
    return [
        Shot("runs", f"/ui/runs?selected={master},{ordered}", ".spark"),
        Shot("run", f"/ui/runs/{ordered}?step=1", ".panel canvas"),
        Shot("parameters", f"/ui/runs/{master}?view=parameters", ".heat"),
        Shot("config", f"/ui/runs/{master}?view=config", ".config tbody tr.is-set"),
        Shot("attempts", f"/ui/runs/{master}?view=attempts", ".attempt-grid", height=560),
        Shot("logs", f"/ui/runs/{master}?view=logs", ".log-line"),
        Shot("compare", f"/ui/compare?a={master}&b={ordered}&step=5", ".panel canvas", height=1380),
        Shot("experiments", "/ui/experiments", "main a"),
        Shot("experiment", f"/ui/experiments/{experiment['id']}", ".matrix tbody tr"),
        Shot("submit", "/ui/submit", ".form-field"),
        Shot("cluster", "/ui/cluster", ".grid-table"),
    ]


def train(client: httpx.Client) -> dict[str, Any]:
    """Train the thirty-step experiment to its end, and leave two runs in the queue for the cluster's page."""
    made = client.post("/experiments", json={"builtin": "thirty-step"}).raise_for_status().json()
    deadline = time.monotonic() + _TRAIN_S
    while (experiment := client.get(f"/experiments/{made['id']}").json())["status"] not in ("succeeded", "stopped"):
        assert time.monotonic() < deadline, experiment["status"]
        time.sleep(1.0)
    client.post("/queue/pause", json={"why": "for the pictures"}).raise_for_status()
    for ordering in ("master", "ordered"):
        client.post("/runs", json={"name": f"waiting-{ordering}", "step_ordering": ordering}).raise_for_status()
    return dict(experiment)


def newest_thirty_step(client: httpx.Client) -> dict[str, Any]:
    """The newest thirty-step experiment whose runs have all ended."""
    for experiment in client.get("/experiments").raise_for_status().json()["experiments"]:
        if experiment["builtin"] == "thirty-step" and experiment["status"] == "succeeded":
            return dict(client.get(f"/experiments/{experiment['id']}").json())
    raise SystemExit("the service has no thirty-step experiment that has ended: muonscope experiment run thirty-step")


def settle(page: Page, shot: Shot) -> None:
    expect(page.locator(shot.shows).first).to_be_visible(timeout=20_000)
    expect(page.locator(".skeleton")).to_have_count(0)
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(800)  # the loss lines of the rows, a few at a time


def take(browser: Browser, address: str, shot: Shot, theme: str) -> Path:
    context = browser.new_context(
        base_url=address, viewport={"width": WIDTH, "height": shot.height}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(shot.path)
    settle(page, shot)
    path = OUT / f"{shot.name}-{theme}.png"
    page.screenshot(path=path)
    context.close()
    size = path.stat().st_size
    print(f"{path.name}: {size / 1024:.0f} KiB", flush=True)
    assert size <= MOST_BYTES, f"{path.name} has {size} bytes, more than {MOST_BYTES}"
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="a running service; by default one is started and ended")
    parser.add_argument("--only", help="only the pictures whose name holds this")
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        address = asked.url
        if address is None:
            controller = Controller(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            controller.start()
            stack.callback(controller.end, SIGTERM)
            address = controller.address
        client = stack.enter_context(httpx.Client(base_url=address, timeout=30, trust_env=False))
        experiment = train(client) if asked.url is None else newest_thirty_step(client)
        browser = stack.enter_context(launched("--force-device-scale-factor=1"))
        for shot in shots(experiment):
            for theme in ("light", "dark"):
                if asked.only is None or asked.only in f"{shot.name}-{theme}":
                    take(browser, address, shot, theme)


if __name__ == "__main__":
    main()
