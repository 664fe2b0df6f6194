"""A folder of DeepSpeed's CSV monitor is read as the steps it was written from."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from muonscope.client.deepspeed_csv import ImportFailed, read_monitor_folder

NAN, INF = math.nan, math.inf


def _write(folder: Path, **series: list[tuple[int, float]]) -> Path:
    for name, rows in series.items():
        lines = [f"step,{name}", *(f"{samples},{value}" for samples, value in rows)]
        (folder / f"Train_Samples_{name}.csv").write_text("\r\n".join(lines) + "\r\n")
    return folder


def test_losses_come_before_their_step_and_rates_and_scales_after_it(tmp_path: Path) -> None:
    log = read_monitor_folder(
        _write(
            tmp_path,
            train_loss=[(0, 3.0), (64, 2.5), (128, 2.0)],
            lr=[(64, 0.1), (128, 0.2), (192, 0.3)],
            loss_scale=[(64, 65536.0), (128, 32768.0), (192, 32768.0)],
        )
    )

    assert log.batch_size == 64
    assert [(record.step, record.loss, record.lr) for record in log.records] == [
        (0, 3.0, 0.1), (1, 2.5, 0.2), (2, 2.0, 0.3),
    ]  # fmt: skip
    assert [(record.loss_scale_before, record.loss_scale_after) for record in log.records] == [
        (None, 65536.0), (65536.0, 32768.0), (32768.0, 32768.0),
    ]  # fmt: skip
    assert [record.discarded for record in log.records] == [False, True, False]


def test_values_that_are_not_finite_and_series_that_are_missing_stay_what_they_are(tmp_path: Path) -> None:
    losses = [(0, NAN), (8, INF), (16, -INF), (24, 1e-300)]

    records = read_monitor_folder(_write(tmp_path, train_loss=losses)).records

    assert [repr(record.loss) for record in records] == ["nan", "inf", "-inf", "1e-300"]
    assert all(record.lr is None and record.loss_scale_after is None for record in records)


def test_of_a_step_that_a_resumed_run_wrote_again_the_newest_stays(tmp_path: Path) -> None:
    path = _write(tmp_path, lr=[(8, 1.0), (16, 2.0)]) / "Train_Samples_lr.csv"
    path.write_text(path.read_text() + "step,lr\n16,5.0\n24,6.0\n")

    assert [record.lr for record in read_monitor_folder(tmp_path).records] == [1.0, 5.0, 6.0]


def test_what_deepspeeds_own_monitor_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.comm as dist
    from deepspeed.monitor.csv_monitor import csvMonitor

    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monitor = csvMonitor(SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="a job"))
    for step in range(3):
        monitor.write_events([("Train/Samples/train_loss", 3.0 - step, 16 * step)])
        monitor.write_events([("Train/Samples/lr", 0.1 * step, 16 * step + 16)])

    log = read_monitor_folder(tmp_path / "a job")

    assert (log.name, log.batch_size) == ("a job", 16)
    assert [(record.step, record.loss, record.lr) for record in log.records] == [
        (0, 3.0, 0.0), (1, 2.0, 0.1), (2, 1.0, 0.2),
    ]  # fmt: skip


def test_a_folder_without_such_files_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match=r"none of .*Train_Samples_lr\.csv") as caught:
        read_monitor_folder(tmp_path)
    assert caught.value.remedy == "give the folder <output_path>/<job_name>"


@pytest.mark.parametrize("line", ["8", "8,abc", "8.5,1.0", "8,1,2"])
def test_a_line_that_is_not_two_numbers_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "Train_Samples_lr.csv").write_text(f"step,lr\n{line}\n")
    with pytest.raises(ImportFailed, match="line 2 is not"):
        read_monitor_folder(tmp_path)


def test_counts_that_are_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="not those of training steps"):
        read_monitor_folder(_write(tmp_path, lr=[(0, 1.0)]))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (b"0,0.1\n32,0.1\n", "stands at 0 samples"),
        (b"32,\xff\n", "cannot be read after line 0: .* can't decode"),
        (b"32," + b"1" * 200_000 + b"\n", "cannot be read after line 1: field larger than field limit"),
        (b"99999999999999999999,0.1\n", "line 2 is not `samples,value`"),
    ],
)
def test_what_no_monitor_writes_is_refused_by_name(tmp_path: Path, rows: bytes, said: str) -> None:
    (tmp_path / "Train_Samples_lr.csv").write_bytes(b"step,lr\n" + rows)

    with pytest.raises(ImportFailed, match=said) as refused:
        read_monitor_folder(tmp_path)

    assert str(tmp_path) in str(refused.value)
