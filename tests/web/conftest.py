"""The real application on a real socket, a cluster in memory, and Debian's Chromium in front of it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser import launched, missing
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving, short_rests
from tests.web.scripted_worker import ScriptedWorker

MARKUP_NAME = "<img src=x onerror=alert(1)>"
# For what takes a moment on an idle machine; Playwright's own limit of five seconds tests the machine.
_WAIT_S = 60.0
expect.set_options(timeout=_WAIT_S * 1000)
# A scripted worker gives one sign of life, and a page may be looked at for longer than a lease's usual half minute.
LEASE_S = 3600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    lacking = missing()
    if lacking and os.environ.get("CI"):
        # Where everything is installed on purpose, a test that does not run is a failure.
        raise pytest.UsageError(lacking)
    if lacking:
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture(scope="module")  # Playwright keeps an event loop running: none may be left to other tests
def browser() -> Iterator[Browser]:
    # One process draws all tabs: what it has compiled for one page is there for the next.
    with launched("--renderer-process-limit=1") as browser:
        yield browser


class Watched:
    """A page that remembers what went wrong in it and whom it talked to."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.hosts: set[str] = set()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]) if "//" in request.url else None)


@pytest.fixture(scope="module")
def window(browser: Browser, site: "Site") -> Iterator[BrowserContext]:
    """One browser window for all tests of a module, kept open by an empty page.

    Chromium builds its own user interface for every new window, which costs more than the page in it: a test gets tabs.
    """
    context = browser.new_context(base_url=site.address, accept_downloads=True)
    context.set_default_timeout(_WAIT_S * 1000)
    context.new_page()
    yield context
    context.close()


@contextmanager
def tab(
    context: BrowserContext, path: str, *, width: int = 1280, height: int = 800, theme: str = "light"
) -> Iterator[Watched]:
    """Open a path in a tab of the window; what the page has stored goes with it."""
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    watched = Watched(page)
    try:
        page.goto(path)
        yield watched
        page.evaluate("localStorage.clear()")
    finally:
        page.close()


def wait_for(page: Page, condition: str) -> None:
    """Wait until an expression of the page's holds: a layout follows what changed it a moment later.

    Playwright's own wait evaluates text within the page, which the dashboard's policy forbids.
    """
    deadline = time.monotonic() + _WAIT_S
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


@pytest.fixture
def open_page(browser: Browser, window: BrowserContext, site: "Site") -> Iterator[Callable[..., Watched]]:
    """Open a path of the site in a tab; `apart` is another person's browser, which shares nothing with it."""
    with ExitStack() as stack:

        def open_(path: str, *, apart: bool = False, **look: Any) -> Watched:
            context = window
            if apart:
                context = browser.new_context(base_url=site.address)
                stack.callback(context.close)
            return stack.enter_context(tab(context, path, **look))

        yield open_


class Site:
    """The service and the runs that these tests look at."""

    def __init__(self, client: httpx.Client, launcher: FakeLauncher) -> None:
        self.client = client
        self.launcher = launcher
        self.address = str(client.base_url).rstrip("/")
        self.names: dict[str, str] = {}

    def submit(self, **spec: object) -> str:
        made = self.client.post("/runs", json={"world_size": 2, **spec})
        made.raise_for_status()
        return str(made.json()["id"])

    def worker(self, run_id: str, words: str = "scripted") -> ScriptedWorker:
        """Wait until the controller has submitted the run's attempt, and enrol in its place."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            # A copy: the service adds to it from its own thread.
            for submission_id, request in dict(self.launcher.requests).items():
                if submission_id.startswith(f"run-{run_id}-"):
                    worker = ScriptedWorker(self.client, submission_id, request.enrolment_token, words)
                    worker.tell_facts()
                    return worker
            assert time.monotonic() < deadline, f"run {run_id} was never submitted"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    launcher = FakeLauncher(gpus=8.0)
    with short_rests(), serving(tmp_path_factory.mktemp("site"), launcher, tick_s=0.05, lease_s=LEASE_S) as client:
        site = Site(client, launcher)
        experiment = client.post("/experiments", json={"builtin": "thirty-step"}).json()
        site.names["experiment"] = experiment["id"]
        for run in experiment["runs"]:
            site.worker(run["id"]).finish()
            key = f"z{run['spec']['zero_stage']}-{run['spec']['loss_scale']['initial_power']}"
            site.names[f"{key}-{run['spec']['step_ordering']}"] = run["id"]
        base = {"world_size": 2, "steps": 30, "tags": [MARKUP_NAME], "notes": MARKUP_NAME}
        base["loss_scale"] = {"initial_power": 16}
        matrix = {"step_ordering": ["master", "ordered"]}
        body = {"name": MARKUP_NAME, "base": {**base, "name": MARKUP_NAME}, "matrix": matrix}
        marked = client.post("/experiments", json=body).json()
        for run in marked["runs"]:
            site.worker(run["id"], MARKUP_NAME).finish()
        site.names["markup experiment"] = marked["id"]
        site.names["markup"], site.names["other markup"] = (run["id"] for run in marked["runs"])
        yield site
