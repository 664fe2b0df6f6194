"""Whoever waits for a first step is told what it may be at, once, and only where it takes long."""

import io
import sys
import threading
import time

import pytest

from workers.slow_start import SlowStart


def _until_said(capsys: pytest.CaptureFixture[str]) -> str:
    deadline, said = time.monotonic() + 60, ""
    while not said and time.monotonic() < deadline:
        time.sleep(0.001)
        said = capsys.readouterr().err
    return said


def test_a_block_that_takes_long_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    slow = SlowStart("it compiles", after_s=0.0)

    with slow.watch():
        first = _until_said(capsys)
    with slow.watch():
        time.sleep(0.02)

    assert first == "it compiles\n"
    assert capsys.readouterr().err == ""


def test_a_block_that_is_done_in_time_is_not_told_of_and_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())

    with pytest.raises(ZeroDivisionError), SlowStart("it compiles", after_s=60.0).watch():
        raise ZeroDivisionError

    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.001)
    # Of other tests' threads some may have ended meanwhile.
    assert left == set()
    assert capsys.readouterr().err == ""


def test_a_terminal_that_is_gone_is_no_trouble_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    slow = SlowStart("it compiles", after_s=0.0)

    with slow.watch():
        deadline = time.monotonic() + 60
        while not slow._is_said and time.monotonic() < deadline:
            time.sleep(0.001)

    assert slow._is_said
