"""Progress of runs: one bar a run in a terminal, one line a change when piped, nothing under `--json`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from muonscope.cli.run_views import duration, fault_line, status, verdict
from muonscope.cli.screen import Screen, number, visible

if TYPE_CHECKING:
    from muonscope.client import Run


# A tenth of a long run takes hours: who reads a job's log wants to see that it goes on.
_SILENCE_S: Final = 15.0


class Progress(Protocol):
    def update(self, runs: Sequence["Run"]) -> None:
        """Take the runs' newest states, in the order they were given at first."""


@contextmanager
def follow_runs(runs: Sequence["Run"], screen: Screen) -> Iterator[Progress]:
    """Show the progress of `runs` while the block runs."""
    if not screen.is_live:
        yield _Lines(screen)
        return
    from rich.live import Live

    bars = _Bars(runs)
    with Live(bars, console=screen.console(progress=True), refresh_per_second=8):
        yield bars


def total_steps(run: "Run") -> int:
    """Return the steps planned; of a recorded script that said none, those that have come."""
    is_open_ended = run.spec.get("task", {}).get("is_open_ended")
    return int((run.summary.steps if is_open_ended else run.spec.get("steps")) or 0)


class _Lines:
    """One line whenever a run's status or a tenth of its steps has changed, and now and then while it trains."""

    def __init__(self, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._clock = clock
        self._started = clock()
        self._said: dict[str, tuple[str, int, float]] = {}

    def update(self, runs: Sequence["Run"]) -> None:
        for run in runs:
            steps, total = run.summary.steps or 0, total_steps(run)
            tenth = 10 * steps // total if total else 0
            key = f"{run.status} {run.waiting_reason or ''} {tenth}"
            now = self._clock()
            said, at_step, at = self._said.get(run.id, ("", 0, now))
            if said != key or (steps != at_step and now - at >= _SILENCE_S):
                self._said[run.id] = (key, steps, now)
                self._screen.progress(f"[{now - self._started:6.1f} s] {_state(run)}")


def _state(run: "Run") -> str:
    text = f"{run.name}: {status(run)}"
    # A run that is to be tried again has the record of its last attempt until it trains.
    if run.summary.steps and run.status not in ("queued", "pending"):
        text += f", step {run.summary.steps} of {total_steps(run)}, loss scale {number(run.summary.final_loss_scale)}"
    if run.waiting_reason and not run.is_finished:
        text += f" ({run.waiting_reason})"
    return text + (f": {_end(run)}" if run.is_finished else "")


def _end(run: "Run") -> str:
    return fault_line(run) or verdict(run)


class _Bars:
    """A table of bars that Rich redraws."""

    def __init__(self, runs: Sequence["Run"]) -> None:
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._runs = runs
        self._started = time.monotonic()

    def update(self, runs: Sequence["Run"]) -> None:
        self._runs = runs

    def __rich__(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for run in self._runs:
            steps, total = run.summary.steps or 0, total_steps(run)
            mark: Any = self._spinner if run.status == "running" else Text("●" if run.is_finished else "○")
            if run.is_finished:
                note = _end(run)
            else:
                note = run.waiting_reason or f"overflows {number(run.summary.overflows)}"
            table.add_row(
                mark,
                Text(visible(run.name)),
                ProgressBar(total=max(total, 1), completed=steps, width=24),
                Text(f"{steps}/{total}"),
                Text(status(run)),
                Text(visible(note)),
            )
        done = sum(run.is_finished for run in self._runs)
        table.add_row("", Text(f"{done}/{len(self._runs)} runs, {duration(time.monotonic() - self._started)}"))
        return table
