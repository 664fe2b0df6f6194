"""Progress of runs: one bar a run in a terminal, one line a change when piped, nothing under `--json`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from muonscope.cli.run_views import duration, fault_kind, fault_line, status, verdict
from muonscope.cli.screen import Screen, counted, number, visible

if TYPE_CHECKING:
    from muonscope.client import Run


# A tenth of a long run takes hours: who reads a job's log wants to see that it goes on.
_SILENCE_S: Final = 15.0


class Progress(Protocol):
    def update(self, runs: Sequence["Run"]) -> None:
        """Take the runs' newest states, in the order they were given at first."""


@contextmanager
def follow_runs(runs: Sequence["Run"], screen: Screen, *, tells_faults: bool = True) -> Iterator[Progress]:
    """Show the progress of `runs` while the block runs, and at their ends what they failed of, or only its kind."""
    if not screen.is_live:
        yield _Lines(screen, tells_faults=tells_faults)
        return
    from rich.live import Live

    bars = _Bars(runs, tells_faults=tells_faults)
    with Live(bars, console=screen.console(progress=True), refresh_per_second=8):
        yield bars


def total_steps(run: "Run") -> int:
    """Return the steps planned; of a recorded script that said none, those that have come."""
    is_open_ended = run.spec.get("task", {}).get("is_open_ended")
    return int((run.summary.steps if is_open_ended else run.spec.get("steps")) or 0)


class _Lines:
    """One line whenever a run's status or a tenth of its steps has changed, and now and then while it trains."""

    def __init__(
        self, screen: Screen, clock: Callable[[], float] = time.monotonic, *, tells_faults: bool = True
    ) -> None:
        self._screen, self._tells_faults = screen, tells_faults
        self._clock = clock
        self._started = clock()
        self._said: dict[str, tuple[tuple[str, int], str, int, float]] = {}

    def update(self, runs: Sequence["Run"]) -> None:
        for run in runs:
            steps, total = run.summary.steps or 0, total_steps(run)
            state = str(run.status), 10 * steps // total if total and _has_steps(run) else 0
            now, reason = self._clock(), run.waiting_reason or ""
            said, said_reason, at_step, at = self._said.get(run.id, (("", 0), "", 0, now))
            # That it waits for nothing any more is no news: what it does instead is.
            is_news = state != said or reason not in ("", said_reason)
            if is_news or (steps != at_step and now - at >= _SILENCE_S):
                self._said[run.id] = (state, reason, steps, now)
                line = _state(run, tells_faults=self._tells_faults)
                self._screen.progress(f"[{now - self._started:6.1f} s] {line}")


def _has_steps(run: "Run") -> bool:
    # A run that is to be tried again has the record of its last attempt until it trains.
    return bool(run.summary.steps and run.status not in ("queued", "pending"))


def _state(run: "Run", *, tells_faults: bool) -> str:
    from muonscope.contract.spec_facts import has_loss_scale

    text = f"{run.name}: {status(run)}"
    if _has_steps(run):
        text += f", step {run.summary.steps} of {total_steps(run)}"
        if has_loss_scale(run.spec):
            text += f", loss scale {number(run.summary.final_loss_scale)}"
    if run.waiting_reason and not run.is_finished:
        text += f" ({run.waiting_reason})"
    return text + (f": {_end(run, tells_faults=tells_faults)}" if run.is_finished else "")


def _end(run: "Run", *, tells_faults: bool) -> str:
    return (fault_line(run) if tells_faults else fault_kind(run)) or verdict(run)


class _Bars:
    """A table of bars that Rich redraws."""

    def __init__(self, runs: Sequence["Run"], *, tells_faults: bool = True) -> None:
        from rich.spinner import Spinner

        self._tells_faults = tells_faults
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
                note = _end(run, tells_faults=self._tells_faults)
            else:
                note = run.waiting_reason or counted(run.summary.overflows, "overflow")
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
