"""The dashboard's files under /ui/."""

from pathlib import Path

import httpx
import pytest

from service.dashboard import views


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Muonscope</title>")
    (folder / "assets" / "app.js").write_text("start();")
    (tmp_path / "secret.txt").write_text("not for readers")
    monkeypatch.setattr(views, "static_folder", lambda: folder)
    return folder


@pytest.mark.parametrize("path", ["/ui/", "/ui/runs", "/ui/runs/abc", "/ui/compare"])
def test_every_page_of_the_dashboard_is_the_one_page(bundle: Path, shared: httpx.Client, path: str) -> None:
    page = shared.get(path)
    assert page.status_code == 200
    assert "<title>Muonscope</title>" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe-eval" not in policy


def test_files_are_served_as_what_they_are(bundle: Path, shared: httpx.Client) -> None:
    script = shared.get("/ui/assets/app.js")
    assert script.text == "start();"
    assert "javascript" in script.headers["content-type"]


def test_a_missing_file_is_404_and_not_a_page(bundle: Path, shared: httpx.Client) -> None:
    assert shared.get("/ui/assets/gone.js").status_code == 404


@pytest.mark.parametrize("path", ["/ui/..%2fsecret.txt", "/ui/%2e%2e/secret.txt", "/ui//etc/passwd", "/ui/a%00b"])
def test_nothing_outside_the_folder_is_served(bundle: Path, shared: httpx.Client, path: str) -> None:
    answer = shared.get(path)
    assert "not for readers" not in answer.text
    assert "root:" not in answer.text


def test_an_absent_bundle_is_said_plainly(
    shared: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "static_folder", lambda: tmp_path / "nowhere")
    page = shared.get("/ui/runs")
    assert page.status_code == 503
    assert "not built" in page.text
