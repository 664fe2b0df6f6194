"""Installing a release: once, as its published hash says, whole or not at all. pip is real, its index a folder."""

import hashlib
import io
import json
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from muonscope.contract.releases import RELEASES
from workers import releases
from workers.background import Background
from workers.errors import ReleaseUnavailable
from workers.releases import (
    INSTALLED,
    ensure_installed,
    import_path,
    is_installed_already,
    release_folder,
    stands_in_front,
)

VERSION = "0.19.2"
SETUP = "from setuptools import setup\nsetup(name='deepspeed', version='{version}', packages=['deepspeed'])\n"


def publish(folder: Path, *, version: str = VERSION, setup: str = SETUP) -> str:
    """Put a small source distribution into pip's index; returns its hash."""
    files = {
        "setup.py": setup.format(version=version),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n",
        "deepspeed/__init__.py": f"__version__ = '{version}'\n",
    }
    path = folder / f"deepspeed-{VERSION}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"deepspeed-{VERSION}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds anything."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def allow(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    monkeypatch.setitem(RELEASES, VERSION, replace(RELEASES[VERSION], sha256=sha256))


def left_behind(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_two_who_ask_at_once_get_one_installation_in_place_of_another_sources(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="workers.releases")
    allow(monkeypatch, publish(index))
    root = tmp_path / "releases"
    stale = release_folder(root, VERSION)
    (stale / "deepspeed").mkdir(parents=True)
    (stale / INSTALLED).write_text(json.dumps({"version": VERSION, "sha256": "0" * 64}))

    asked = [Background(lambda: ensure_installed(root, VERSION)) for _ in range(2)]
    folders = {each.wait() for each in asked}

    assert folders == {stale}
    (folder,) = folders
    assert (folder / "deepspeed" / "__init__.py").read_text() == f"__version__ = '{VERSION}'\n"
    assert left_behind(root) == [folder.name]
    assert len([record for record in caplog.records if record.message.startswith("installing")]) == 1

    # What is there is taken as it is, without an index.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert ensure_installed(root, VERSION) == folder


def test_a_source_that_was_changed_is_not_installed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index)
    root = tmp_path / "releases"

    with pytest.raises(ReleaseUnavailable, match=r"(?i)hash") as refused:
        ensure_installed(root, VERSION)

    assert (refused.value.version, left_behind(root)) == (VERSION, [])


def test_the_command_installs_beforehand_and_says_in_words_what_cannot_be_had(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allow(monkeypatch, publish(index))
    monkeypatch.setattr(sys, "argv", ["workers.releases", "--home", str(tmp_path), VERSION])
    releases.main()
    printed = capsys.readouterr().out.strip()
    monkeypatch.setattr(sys, "argv", ["workers.releases", "--home", str(tmp_path), VERSION, "0.17.6"])
    with pytest.raises(SystemExit) as ended:
        releases.main()

    assert printed == str(release_folder(tmp_path / "releases", VERSION))
    assert "0.17.6" in str(ended.value)


def test_what_builds_as_another_version_is_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, publish(index, version="0.19.1"))

    with pytest.raises(ReleaseUnavailable):
        ensure_installed(tmp_path / "releases", VERSION)

    assert left_behind(tmp_path / "releases") == []


def test_an_installation_that_is_given_up_leaves_no_process_and_no_folder(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, publish(index, setup="import time\ntime.sleep(600)\n"))
    give_up = threading.Event()
    others = set(psutil.Process().children(recursive=True))
    installing = Background(lambda: ensure_installed(tmp_path / "releases", VERSION, give_up))
    building = _wait_for_build(others)

    give_up.set()

    with pytest.raises(ReleaseUnavailable, match="it was given up"):
        installing.wait()
    assert psutil.wait_procs(building, timeout=60)[1] == []
    assert left_behind(tmp_path / "releases") == []


def _wait_for_build(others: set[psutil.Process]) -> list[psutil.Process]:
    """Pip and what it began, without what earlier tests of this process keep alive for later ones."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        family = [each for each in psutil.Process().children(recursive=True) if each not in others]
        if len(family) > 1:
            return family
        time.sleep(0.05)
    raise AssertionError("pip began no build")


def test_waiting_for_another_process_ends_with_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath(f".{release_folder(tmp_path, VERSION).name}.lock").touch()
    give_up = threading.Event()
    give_up.set()
    with releases._only_one(
        tmp_path / f".{release_folder(tmp_path, VERSION).name}.lock",
        RELEASES[VERSION],
        time.monotonic() + 60,
        threading.Event(),
    ), pytest.raises(ReleaseUnavailable, match="another process has been installing it"):  # fmt: skip
        ensure_installed(tmp_path, VERSION, give_up)


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "releases").write_text("a file")

    with pytest.raises(ReleaseUnavailable, match="cannot be written"):
        ensure_installed(tmp_path / "releases", VERSION)


def test_the_release_stands_in_front_of_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/code::/more")

    assert import_path(Path("/releases/one")) == "/releases/one:/code:/more"


def test_a_release_in_front_is_told_from_the_interpreters_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    assert not stands_in_front()

    monkeypatch.syspath_prepend(str(tmp_path))
    assert not stands_in_front(), "a folder that nothing was installed into is none of ours"
    (tmp_path / INSTALLED).write_text("{}")
    assert stands_in_front()


def test_the_installed_release_needs_no_other() -> None:
    assert is_installed_already("0.19.8")
    assert not is_installed_already(VERSION)
