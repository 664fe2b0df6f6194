"""The whole path in a browser: a pair submitted, trained by DeepSpeed under Ray, watched and compared."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from service.serve import bind

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

_START_S = 120.0
_RUN_MS = 180_000
_CPU = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Controller:
    """`muonscope up` as a process of its own, on one port and one store over its restarts."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with bind("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "muonscope.cli.main", "up", "--port", str(self.port), "--gpus", "2"]
        environment = {**os.environ, **_CPU, "MUONSCOPE_HOME": str(self.home)}
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            assert self.process.poll() is None, (self.home / "up.log").read_text()
            assert time.monotonic() < deadline, (self.home / "up.log").read_text()
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.address}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, with_signal: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)
        self.process.wait(60)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path)
    controller.start()
    yield controller
    if controller.process is not None and controller.process.poll() is None:
        controller.end(signal.SIGTERM)


def test_master_dies_and_ordered_trains_before_the_readers_eyes(controller: Controller, browser: Browser) -> None:
    context = browser.new_context(base_url=controller.address, accept_downloads=True)
    page = context.new_page()
    page.goto("/ui/submit")
    page.get_by_role("button", name="Submit as pair").click()
    cards = page.locator(".compare-card")
    expect(cards).to_have_count(2)
    expect(cards.filter(has_text="master")).to_contain_text("dies", timeout=_RUN_MS)
    expect(cards.filter(has_text="ordered")).to_contain_text("trains", timeout=_RUN_MS)
    expect(page.get_by_text("First divergence at step 0.")).to_be_visible(timeout=20_000)
    expect(page.get_by_text("same data, same initial parameters")).to_be_visible()

    second = browser.new_context().new_page()
    second.goto(page.url)
    expect(second.get_by_text("First divergence at step 0.")).to_be_visible()
    second.context.close()

    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("link", name=re.compile("master.*CSV")).click()
    header, *rows = Path(download.value.path()).read_text().splitlines()
    overflow = header.split(",").index("overflow")
    assert [row.split(",")[overflow] for row in rows] == ["true"] * 17

    page.evaluate("window.isTheSamePage = true")
    controller.end(signal.SIGKILL)
    expect(page.get_by_role("alert").filter(has_text="Disconnected")).to_be_visible(timeout=20_000)
    controller.start()
    expect(page.get_by_role("alert").filter(has_text="Disconnected")).to_have_count(0, timeout=20_000)
    assert page.evaluate("window.isTheSamePage") is True
    context.close()
