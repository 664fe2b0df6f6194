"""Debian's Chromium, driven by Playwright, and what must be there for it to show the dashboard."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from service.dashboard import views

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def chromium() -> str | None:
    return os.environ.get("MUONSCOPE_TEST_CHROMIUM") or shutil.which("chromium")


def missing() -> str | None:
    """Say what a browser test lacks here, with the command that brings it."""
    if chromium() is None:
        return "Chromium is not installed: apt-get install chromium"
    if not (views.static_folder() / "index.html").is_file():
        return "the dashboard is not built: npm --prefix service/dashboard/web run build"
    return None


@contextmanager
def launched(*more_arguments: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*ARGUMENTS, *more_arguments])
        yield browser
        browser.close()
