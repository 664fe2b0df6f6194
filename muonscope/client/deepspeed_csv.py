"""Reads what DeepSpeed's CSV monitor wrote: a folder with one file a scalar, rows of (samples, value).

    Train_Samples_train_loss.csv    the samples before the step
    Train_Samples_lr.csv            the samples after it
    Train_Samples_loss_scale.csv    the samples after it, the scale that the next step uses

The monitor writes no overflow. DeepSpeed's scaler lowers the scale for no other reason, so a step after which it is
lower is an overflow here; one that hysteresis let pass without is not known. Every value is kept as it was written.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from muonscope.contract.telemetry import StepRecord
from muonscope.errors import MuonscopeError

_PREFIX: Final = "Train_Samples_"
_LOSS, _LR, _SCALE = "train_loss", "lr", "loss_scale"


class ImportFailed(MuonscopeError):
    """A folder that does not hold what DeepSpeed's CSV monitor writes."""

    def __init__(self, path: Path, message: str, *, remedy: str) -> None:
        super().__init__(f"{path}: {message}", remedy=remedy)
        self.path = path


@dataclass(frozen=True, slots=True)
class MonitorLog:
    """A training run as its monitor logged it."""

    name: str
    batch_size: int
    records: list[StepRecord]


def read_monitor_folder(folder: Path) -> MonitorLog:
    """Read the folder that DeepSpeed names after `csv_monitor.job_name`.

    Raises:
        ImportFailed: no such folder, none of the files, or rows that are not two numbers.
    """
    if not folder.exists():
        raise ImportFailed(folder, "there is no such file or folder", remedy="check the path")
    series = {name: _read_series(folder / f"{_PREFIX}{name}.csv") for name in (_LOSS, _LR, _SCALE)}
    after = sorted({*series[_LR], *series[_SCALE]})
    if not after and not series[_LOSS]:
        files = ", ".join(f"{_PREFIX}{name}.csv" for name in series)
        raise ImportFailed(folder, f"none of {files} is here", remedy="give the folder <output_path>/<job_name>")
    batch_size = _batch_size(after or sorted(series[_LOSS]), folder)
    if 0 in after:
        raise ImportFailed(
            folder, "a learning rate or loss scale stands at 0 samples, after no step",
            remedy="remove that row: the monitor writes both after a step",
        )  # fmt: skip
    before = {samples + batch_size: value for samples, value in series[_LOSS].items()}
    ends = sorted({*after, *before})
    records, scale = [], None
    for end in ends:
        scale_after = series[_SCALE].get(end)
        fell = scale is not None and scale_after is not None and scale_after < scale
        records.append(
            StepRecord(
                end // batch_size - 1, overflow=fell, discarded=fell, loss_scale_before=scale,
                loss_scale_after=scale_after, loss=before.get(end), lr=series[_LR].get(end),
            )
        )  # fmt: skip
        scale = scale_after
    return MonitorLog(folder.resolve().name, batch_size, records)


def _read_series(path: Path) -> dict[int, float]:
    """Return samples -> value; of a count written twice, by a run that was resumed, the newest."""
    if not path.exists():
        return {}
    found: dict[int, float] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in _rows(path, file):
            # The header comes again where a resumed run went on writing.
            if not row or row[0] == "step":
                continue
            try:
                samples, value = row
                if int(samples) >= 2**63:
                    raise ValueError("no count of samples")
                found[int(samples)] = float(value)
            except ValueError as error:
                raise ImportFailed(
                    path, f"line {number} is not `samples,value`: {','.join(row)[:80]!r}",
                    remedy="mend or remove the line; a value is a number, nan, inf or -inf",
                ) from error  # fmt: skip
    return found


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    number = 0
    try:
        for number, row in enumerate(csv.reader(file), start=1):
            yield number, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ImportFailed(
            path, f"cannot be read after line {number}: {error}", remedy="give the file as DeepSpeed wrote it"
        ) from error


def _batch_size(samples: list[int], folder: Path) -> int:
    """Return by how many samples a step goes on: the greatest number that divides every count."""
    size = math.gcd(*samples)
    if size <= 0 or samples[0] < 0:
        raise ImportFailed(
            folder, f"the counts of samples {samples[:3]} are not those of training steps",
            remedy="import a folder whose files count training samples",
        )  # fmt: skip
    return size
