"""The shipper: every record arrives once, whoever is killed or away meanwhile."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from muonscope.contract.telemetry import StepRecord, encode_record, frame
from tests.unit.workers.fake_controller import FakeController, running, wait_until
from workers.errors import ControllerAway, ControllerRefused
from workers.shipper import Shipper, count_records, drain, is_shipper_alive, settle, ship_until_done, start_detached
from workers.spool import Destination, Shipped, SpoolWriter

REPOSITORY = Path(__file__).resolve().parents[3]


def record(step: int) -> StepRecord:
    return StepRecord(step, overflow=False, discarded=False, loss=float("nan") if step % 3 else 0.5)


def write(directory: Path, controller: FakeController, steps: range, segment_bytes: int = 1 << 20) -> SpoolWriter:
    destination = Destination(controller.url, controller.attempt_id, controller.token, controller.epoch)
    writer = SpoolWriter(directory, destination, segment_bytes)
    for step in steps:
        writer.append(record(step))
    return writer


@contextmanager
def shipper_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-m", "workers.shipper", str(directory)], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_one_batch_carries_what_is_waiting_and_moves_the_offset(tmp_path: Path) -> None:
    with running() as controller:
        writer = write(tmp_path, controller, range(5))
        with closing(Shipper(tmp_path)) as shipper:
            assert shipper.ship_once() == 5
            assert shipper.ship_once() == 0

        assert sorted(controller.records) == [0, 1, 2, 3, 4]
        assert Shipped.read(tmp_path).records == 5
        writer.close()


def test_nothing_is_acknowledged_while_the_controller_is_away(tmp_path: Path) -> None:
    controller = FakeController()
    controller.start()
    controller.stop()
    writer = write(tmp_path, controller, range(3))

    with closing(Shipper(tmp_path)) as shipper, pytest.raises(ControllerAway):
        shipper.ship_once()

    assert Shipped.read(tmp_path) == Shipped()
    writer.close()


def test_a_drain_ships_what_is_left_once_the_controller_is_back(tmp_path: Path) -> None:
    controller = FakeController()
    controller.start()
    controller.stop()
    write(tmp_path, controller, range(40), segment_bytes=300).close()
    threading.Timer(0.4, controller.start).start()

    settled = settle(tmp_path, patience_s=60)

    assert (settled.declared, settled.shipped, settled.is_complete) == (40, 40, True)
    assert sorted(controller.records) == list(range(40))
    controller.stop()


def test_a_drain_gives_up_after_its_patience_and_says_what_is_missing(tmp_path: Path) -> None:
    controller = FakeController()
    controller.start()
    controller.stop()
    write(tmp_path, controller, range(7)).close()
    started = time.monotonic()

    settled = settle(tmp_path, patience_s=0.5)

    assert (settled.declared, settled.shipped) == (7, 0)
    assert not settled.is_complete
    assert time.monotonic() - started < 60


def test_an_attempt_that_never_opened_a_spool_has_nothing_to_settle(tmp_path: Path) -> None:
    assert settle(tmp_path / "never", patience_s=0.1).declared == 0


def test_a_record_cut_off_by_a_kill_is_not_declared(tmp_path: Path) -> None:
    with running() as controller:
        write(tmp_path, controller, range(4)).close()
        with next(tmp_path.glob("frames-*")).open("ab") as segment:
            segment.write(frame(encode_record(record(4)))[:-3])

        settled = settle(tmp_path, patience_s=60)

        assert (settled.declared, settled.shipped) == (4, 4)


def test_a_damaged_spool_is_reported_and_not_shipped(tmp_path: Path) -> None:
    with running() as controller:
        write(tmp_path, controller, range(2)).close()
        segment = next(tmp_path.glob("frames-*"))
        data = bytearray(segment.read_bytes())
        data[20] ^= 1
        segment.write_bytes(data)

        shipped = drain(tmp_path, patience_s=60)

        assert "damaged" in str(shipped.refused)
        assert controller.records == {}


def test_without_room_for_the_offset_all_is_shipped_and_counted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with running() as controller:
        write(tmp_path, controller, range(9)).close()
        monkeypatch.setattr(Shipped, "write", full)

        settled = settle(tmp_path, patience_s=60)

        assert (settled.declared, settled.shipped, len(controller.records)) == (9, 9, 9)


def test_a_refusal_is_kept_beside_the_spool(tmp_path: Path) -> None:
    with running() as controller:
        write(tmp_path, controller, range(2)).close()
        controller.superseded = True

        with closing(Shipper(tmp_path)) as shipper, pytest.raises(ControllerRefused):
            shipper.ship_once()

        assert "superseded" in str(Shipped.read(tmp_path).refused)


def test_a_repeated_batch_is_taken_as_the_same_one(tmp_path: Path) -> None:
    with running() as controller:
        write(tmp_path, controller, range(6)).close()
        drain(tmp_path, patience_s=60)
        # As if the shipper had been killed between the answer and the offset.
        Shipped().write(tmp_path)

        drain(tmp_path, patience_s=60)

        assert sorted(controller.records) == list(range(6))
        assert controller.repeats == 6


def test_the_shipper_ends_by_itself_when_the_writer_is_gone_and_all_is_shipped(tmp_path: Path) -> None:
    with running() as controller:
        write(tmp_path, controller, range(9)).close()
        thread = threading.Thread(target=ship_until_done, args=(tmp_path,), daemon=True)
        thread.start()
        wait_until(lambda: Shipped.read(tmp_path).records == 9)

        # The driver has read the count and cleans up.
        shutil.rmtree(tmp_path)
        thread.join(timeout=60)

        assert not thread.is_alive()


def test_the_shipper_ends_when_its_spool_was_removed_while_the_controller_is_away(tmp_path: Path) -> None:
    directory = tmp_path / "run-x-a1"
    with running() as controller:
        writer = write(directory, controller, range(9))
    thread = threading.Thread(target=ship_until_done, args=(directory,), daemon=True)
    thread.start()
    writer.close()
    # The counter-test: while the spool is there it is tried again.
    thread.join(timeout=1)
    assert thread.is_alive()

    shutil.rmtree(directory)
    thread.join(timeout=60)

    assert not thread.is_alive()


@pytest.mark.parametrize("is_orphan", [True, False])
def test_a_superseded_spool_whose_writer_is_gone_goes_with_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_orphan: bool
) -> None:
    monkeypatch.setattr("workers.shipper.DRAINED_LINGER_S", 0.2)
    directory = tmp_path / "run-x-a1"
    with running() as controller:
        writer = write(directory, controller, range(3))
        controller.superseded = True
        if is_orphan:
            writer.close()
        ship_until_done(directory)
        # The counter-test: a living writer's driver still reads the reason.
        assert directory.exists() is not is_orphan
        assert is_orphan or Shipped.read(directory).refused is not None
        writer.close()


def test_shippers_killed_at_any_moment_lose_and_repeat_nothing_that_is_stored(tmp_path: Path) -> None:
    chance = random.Random(7)
    with running() as controller:
        writer = write(tmp_path, controller, range(0), segment_bytes=4000)
        step = 0
        for _ in range(6):
            with shipper_process(tmp_path) as process:
                until = time.monotonic() + chance.uniform(0.15, 0.6)
                while time.monotonic() < until:
                    writer.append(record(step))
                    step += 1
                    time.sleep(0.001)
                os.kill(process.pid, signal.SIGKILL)
        writer.close()

        settled = settle(tmp_path, patience_s=60)

        assert settled.declared == settled.shipped == step == count_records(tmp_path)
        assert sorted(controller.records) == list(range(step))


def test_a_detached_shipper_outlives_its_starter_and_is_alone(tmp_path: Path) -> None:
    with running() as controller:
        writer = write(tmp_path, controller, range(3))
        start_detached(tmp_path)
        start_detached(tmp_path)

        wait_until(lambda: len(controller.records) == 3, what="the shipment")

        assert is_shipper_alive(tmp_path)
        assert controller.repeats == 0
        controller.superseded = True
        writer.append(record(3))
        wait_until(lambda: not is_shipper_alive(tmp_path), what="the shipper's end after a refusal")
        writer.close()
