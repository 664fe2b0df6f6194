"""Columns for tests, from lists."""

from collections.abc import Sequence

import numpy as np

from muonscope.contract.telemetry import COUNTS, SCALARS
from service.columns import StepColumns


def columns(
    num_steps: int,
    *,
    discarded: Sequence[int] = (),
    start: int = 0,
    **series: Sequence[float | None],
) -> StepColumns:
    """Steps from `start`; the series not given are 1.0 throughout, counts 0, norms 0.5."""
    steps = np.arange(start, start + num_steps)
    flags = np.isin(steps, list(discarded))
    defaults: dict[str, list[float | None]] = {name: [1.0] * num_steps for name in SCALARS}
    defaults |= {name: [0.0] * num_steps for name in COUNTS}
    given = {**defaults, **series}
    return StepColumns(
        step=steps,
        attempt=np.ones(num_steps, np.int64),
        overflow=flags,
        discarded=flags,
        values={name: np.array(values, np.float64) for name, values in given.items()},
        measured={name: np.array([value is not None for value in values], np.bool_) for name, values in given.items()},
    )
