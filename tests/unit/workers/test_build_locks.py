"""Locks of torch's builds: held by a process that lives, or left by one that was killed."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers import build_locks
from workers.build_locks import BuildLock, examine_locks, remove_left_locks

# As torch takes it, without the seconds that torch takes to import.
BATON = importlib.util.find_spec("torch").submodule_search_locations[0] + "/utils/file_baton.py"  # type: ignore[union-attr, index]
BUILDS = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("file_baton", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
baton = module.FileBaton(os.environ["LOCK"])
assert baton.try_acquire() == (sys.argv[2] == "builds")
print("ready", flush=True)
baton.wait()
"""
AN_HOUR = 3600.0


@contextmanager
def script(lock: Path, does: str) -> Iterator[subprocess.Popen[str]]:
    """A script that `builds`, or that `waits` for whoever does."""
    command = [sys.executable, "-c", BUILDS, BATON, does]
    environment = {**os.environ, "LOCK": str(lock)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "py311_cpu" / "fused_adam"
    folder.mkdir(parents=True)
    return folder / "lock"


@pytest.fixture
def killed_build(lock: Path) -> Path:
    with script(lock, "builds"):
        pass
    age(lock, 60)
    return lock


def age(lock: Path, by_s: float) -> None:
    then = time.time() - by_s
    os.utime(lock, (then, then))


def found(lock: Path) -> BuildLock:
    (each,) = examine_locks([lock])
    return each


def test_a_lock_whose_builder_lives_is_held_however_old_it_is(lock: Path) -> None:
    with script(lock, "builds") as builder:
        age(lock, AN_HOUR)
        state = found(lock)

    assert not state.is_left
    assert state.holder.startswith(f"pid {builder.pid} (")
    assert found(lock).is_left


def test_a_lock_whose_builder_was_killed_is_left_though_another_script_waits_for_it(killed_build: Path) -> None:
    with script(killed_build, "waits"):
        state = found(killed_build)

    assert state.is_left
    assert (state.holder, state.compilers) == ("", ())


def test_a_lock_that_was_just_made_is_given_time(lock: Path) -> None:
    lock.touch()

    assert not found(lock).is_left


@pytest.mark.parametrize("works", ["in the folder", "on a file of it"])
def test_a_compiler_whose_script_was_killed_still_works_in_the_folder(killed_build: Path, works: str) -> None:
    folder = killed_build.parent
    place = folder if works == "in the folder" else None
    command = [sys.executable, "-c", "input()", str(folder / "x.o") if place is None else "x.o"]
    with subprocess.Popen(command, cwd=place, stdin=subprocess.PIPE) as compiler:
        state = found(killed_build)

    assert not state.is_left
    assert state.holder == ""
    assert [said.split()[1] for said in state.compilers] == [str(compiler.pid)]
    assert found(killed_build).is_left


def test_who_looks_from_within_the_folder_is_no_compiler(killed_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(killed_build.parent)

    assert found(killed_build).is_left


def test_the_lock_of_another_user_is_told_by_its_age(killed_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    young = found(killed_build)
    age(killed_build, AN_HOUR)

    assert (young.is_left, found(killed_build).is_left) == (False, True)


def test_a_lock_that_is_gone_is_no_lock(lock: Path) -> None:
    assert examine_locks([lock]) == []


@pytest.mark.parametrize(("is_ours", "is_removed"), [(True, True), (False, False)])
def test_a_rank_removes_what_a_killed_build_left_in_the_folder_of_this_machine(
    killed_build: Path, is_ours: bool, is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = killed_build.parent.parent
    monkeypatch.setattr(build_locks, "user_folder_path", lambda: extensions.parent if is_ours else Path("/elsewhere"))

    removed = remove_left_locks(extensions)

    # A named folder may be shared with machines whose builders are not seen: there only an old lock is removed.
    assert removed == ([killed_build] if is_removed else [])
    assert killed_build.exists() is not is_removed


def test_a_rank_leaves_a_build_under_way_however_old_its_lock_is(lock: Path) -> None:
    with script(lock, "builds"):
        age(lock, AN_HOUR)
        during = remove_left_locks(lock.parent.parent)

    assert during == []
    assert remove_left_locks(lock.parent.parent) == [lock]


def test_what_cannot_be_removed_is_left_and_keeps_no_rank_from_training(lock: Path) -> None:
    # Not a file: refused by the system like another user's, whoever runs this.
    lock.mkdir()
    age(lock, AN_HOUR)

    assert remove_left_locks(lock.parent.parent) == []
    assert lock.exists()
