"""What a rank prints reaches the controller, whatever becomes of the rank, and no file grows without end."""

import io
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.workers.fake_controller import running, wait_until
from workers import logs
from workers.controller_client import ControllerClient
from workers.logs import LogShipper, rank_log

PRINTS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from workers.logs import redirect_output
redirect_output(Path(sys.argv[1]))
print("from python")
os.system("echo from a child")
os.write(2, b"beneath python\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_ranks_last_words_are_in_its_file(tmp_path: Path) -> None:
    path = rank_log(tmp_path / "logs", 0)

    subprocess.run([sys.executable, "-c", PRINTS_AND_DIES, str(path)], check=False)

    assert path.read_text().splitlines() == ["from python", "from a child", "beneath python"]


def test_logs_are_shipped_while_ranks_print_and_removed_once_all_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    with running() as controller:
        shipper = LogShipper(folder, 2, ControllerClient(controller.url, controller.attempt_id, controller.token))
        shipper.start()
        rank_log(folder, 0).write_text("zero\n")
        rank_log(folder, 1).write_text("one\nhalf a line")
        wait_until(lambda: controller.logs.get(0) == "zero\n" and controller.logs.get(1), what="both logs")

        shipper.finish(patience_s=60)

    assert controller.logs[1] == "one\nhalf a line"
    assert "[rank 0] zero\n" in controller.logs[None]
    assert "[rank 1] one\n" in capsys.readouterr().out
    assert not folder.exists()


def test_a_controller_that_is_away_costs_nothing_but_its_news(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with running() as controller:
        controller.stop()
        shipper = LogShipper(folder, 1, ControllerClient(controller.url, controller.attempt_id, controller.token))
        shipper.start()
        rank_log(folder, 0).write_text("zero\n")
        controller.start()
        wait_until(lambda: controller.logs.get(0) == "zero\n", what="the log")
        shipper.finish(patience_s=60)


def test_a_file_that_grows_is_cut_and_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CUT_AT_BYTES", 10)
    path = rank_log(tmp_path, 0)
    path.write_text("0123456789\n")
    followed = logs._Followed(path, 0)

    first = followed.read()
    assert first is not None
    followed.shipped(first)
    assert path.stat().st_size == 0
    with path.open("a") as file:
        file.write("more\n")
    second = followed.read()

    assert second is not None
    assert (second.start, second.stop, second.text) == (11, 16, "more\n")


def test_a_file_is_cut_once_all_of_it_is_shipped_and_loses_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CUT_AT_BYTES", 10)
    path = rank_log(tmp_path, 0)
    path.write_text("0123456789\nhalf")
    followed = logs._Followed(path, 0)

    first = followed.read()
    assert first is not None
    followed.shipped(first)
    with path.open("a") as file:
        file.write(" a line\n")
    second = followed.read()
    assert second is not None
    followed.shipped(second)

    assert first.text + second.text == "0123456789\nhalf a line\n"
    assert (second.start, path.stat().st_size) == (11, 0)


def test_a_file_that_is_never_shipped_whole_is_cut_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CUT_AT_BYTES", 5)
    path = rank_log(tmp_path, 0)
    path.write_text("0123456789\nhalf")
    followed = logs._Followed(path, 0)

    first = followed.read()
    assert first is not None
    followed.shipped(first)

    assert path.stat().st_size == 0


@pytest.mark.parametrize("output", ["a full disk", "a terminal of another encoding"])
def test_an_output_that_cannot_take_a_line_ends_no_shipping(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, terminal = tmp_path / "logs", io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    is_full = output == "a full disk"
    disks = [Path("/dev/full").open("w", encoding="utf-8") for _ in range(2)]  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", disks[0] if is_full else terminal)
    with running() as controller:
        shipper = LogShipper(folder, 1, ControllerClient(controller.url, controller.attempt_id, controller.token))
        shipper.start()
        assert shipper._own is not None
        if is_full:
            # As driver.log is then.
            shipper._own.close()
            shipper._own = disks[1]
        rank_log(folder, 0).write_text("loss 0.1 \u2588\u2588 30 %\n")
        wait_until(lambda: 0 in controller.logs, what="the log")
        with rank_log(folder, 0).open("a") as log:
            log.write("done\n")

        wait_until(lambda: controller.logs[0].endswith("done\n"), what="the rest of it")
        shipper.finish(patience_s=60)

    monkeypatch.undo()
    assert is_full or terminal.buffer.getvalue().startswith(b"[rank 0] loss 0.1 ?? 30 %\n")
    for disk in disks:
        with suppress(OSError):
            disk.close()


def test_an_answer_that_is_none_of_the_controllers_ends_no_shipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs"
    with running() as controller:
        asked = threading.Event()

        def page(_: bytes) -> tuple[int, bytes]:
            asked.set()
            return 200, b"<html>We are back soon.</html>"

        monkeypatch.setattr(controller, "_take_log", page)
        shipper = LogShipper(folder, 1, ControllerClient(controller.url, controller.attempt_id, controller.token))
        shipper.start()
        rank_log(folder, 0).write_text("zero\n")
        assert asked.wait(60)
        monkeypatch.undo()

        wait_until(lambda: controller.logs.get(0) == "zero\n", what="the log")
        shipper.finish(patience_s=60)


def test_of_a_rank_that_prints_too_fast_the_middle_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BEHIND_BYTES", 100_000)
    path = rank_log(tmp_path, 0)
    path.write_text("x" * 99 + "\n")
    followed = logs._Followed(path, 0)
    first = followed.read()
    assert first is not None
    followed.shipped(first)
    with path.open("a") as file:
        file.write(("y" * 99 + "\n") * 3000)

    second = followed.read()

    assert second is not None
    assert second.start == 300_100 - logs.MAX_LOG_PIECE
    assert len(second.text) <= logs.MAX_LOG_PIECE
