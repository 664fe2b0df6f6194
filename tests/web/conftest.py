"""The real application on a real socket, a cluster in memory, and Debian's Chromium in front of it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from service.dashboard import views
from tests.unit.controller.fakes import FakeLauncher
from tests.unit.service.live import serving
from tests.web.scripted_worker import ScriptedWorker

CHROMIUM_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
MARKUP_NAME = "<img src=x onerror=alert(1)>"
_WAIT_S = 15.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = _missing()
    if missing and os.environ.get("CI"):
        # Where everything is installed on purpose, a test that does not run is a failure.
        raise pytest.UsageError(missing)
    if missing:
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=missing))


def _chromium() -> str | None:
    return os.environ.get("MUONSCOPE_TEST_CHROMIUM") or shutil.which("chromium")


def _missing() -> str | None:
    if _chromium() is None:
        return "Chromium is not installed: apt-get install chromium"
    if not (views.static_folder() / "index.html").is_file():
        return "the dashboard is not built: npm --prefix service/dashboard/web run build"
    return None


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


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


@pytest.fixture
def open_page(browser: Browser, site: "Site") -> Iterator[Callable[..., Watched]]:
    contexts: list[BrowserContext] = []

    def open_(path: str, *, width: int = 1280, height: int = 800, theme: str = "light") -> Watched:
        context = browser.new_context(
            base_url=site.address,
            viewport={"width": width, "height": height},
            color_scheme=theme,
            accept_downloads=True,
        )
        context.set_default_timeout(_WAIT_S * 1000)
        contexts.append(context)
        watched = Watched(context.new_page())
        watched.page.goto(path)
        return watched

    yield open_
    for context in contexts:
        context.close()


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

    def worker(self, run_id: str) -> ScriptedWorker:
        """Wait until the controller has submitted the run's attempt, and enrol in its place."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            for submission_id, request in self.launcher.requests.items():
                if submission_id.startswith(f"run-{run_id}-"):
                    worker = ScriptedWorker(self.client, submission_id, request.enrolment_token)
                    worker.tell_facts()
                    return worker
            assert time.monotonic() < deadline, f"run {run_id} was never submitted"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    launcher = FakeLauncher(gpus=8.0)
    with serving(tmp_path_factory.mktemp("site"), launcher, tick_s=0.05) as client:
        site = Site(client, launcher)
        experiment = client.post("/experiments", json={"builtin": "thirty-step"}).json()
        site.names["experiment"] = experiment["id"]
        for run in experiment["runs"]:
            site.worker(run["id"]).finish()
            key = f"z{run['spec']['zero_stage']}-{run['spec']['loss_scale']['initial_power']}"
            site.names[f"{key}-{run['spec']['step_ordering']}"] = run["id"]
        markup = site.submit(name=MARKUP_NAME, steps=30, tags=[MARKUP_NAME], notes=MARKUP_NAME)
        site.worker(markup).finish()
        site.names["markup"] = markup
        yield site
