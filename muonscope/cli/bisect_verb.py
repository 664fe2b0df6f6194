"""`muonscope bisect`: find the DeepSpeed releases in which an experiment's answer changed, by real runs."""

import textwrap
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from muonscope.cli import exit_codes
from muonscope.cli.experiment_verbs import follow
from muonscope.cli.interrupts import sigterm_interrupts
from muonscope.cli.options import Json, Url
from muonscope.cli.screen import Screen

if TYPE_CHECKING:
    from muonscope.cli.bisection import Answer, Change
    from muonscope.client import Client, Experiment, Run

# The table's columns that say what is known elsewhere, not what a run showed.
_SAID_ELSEWHERE: Final = ("published figure", "expected figure")
# An error's sentence beside figures: its beginning tells which; `--json` has all of it.
_WIDEST_CELL: Final = 72


def bisect(
    experiment: Annotated[
        str, typer.Option("--experiment", "-e", metavar="NAME", help="A built-in experiment, such as thirty-step.")
    ],
    releases: Annotated[
        str, typer.Option("--releases", "-r", metavar="FROM..TO", help="DeepSpeed releases, both ends included.")
    ] = "..",
    by: Annotated[
        Literal["row", "verdict"],
        typer.Option(help="What counts as a change: any cell of a run's row, or its verdict alone."),
    ] = "row",
    resume: Annotated[
        bool, typer.Option("--resume", help="Take what an earlier bisect has run from the service's record.")
    ] = False,
    gpus_per_rank: Annotated[
        float | None, typer.Option(metavar="SHARE", help="0.5 puts two ranks on one GPU; by default each has its own.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Find the releases in which a built-in experiment's answer changed.

    Each release that the search tries is installed once, unmodified, and the experiment runs under it. Counts and
    verdicts must be equal to be the same, measured numbers within a factor of two. Uses the service at MUONSCOPE_URL;
    where none is named and none answers, starts one and ends it afterwards.

    Ends with 0 when a change was found, 3 when there is none, 1 when a release could not be tried, 130 when stopped.
    """
    from muonscope.cli.bisection import VERDICT, find_changes
    from muonscope.cli.service_process import service_for

    screen = Screen(as_json)
    versions = _range(releases)
    options = {} if gpus_per_rank is None else {"gpus_per_rank": gpus_per_rank}
    with sigterm_interrupts(), service_for(url, screen) as service:
        trials = Trials(service.client, screen, experiment, options)
        if resume:
            trials.take_earlier()
        screen.progress(f"{experiment} under {len(versions)} releases, {versions[0]} to {versions[-1]}")
        changes = find_changes(versions, trials.answer, (VERDICT,) if by == "verdict" else None)
    _print(screen, experiment, versions, trials, changes)
    raise typer.Exit(exit_codes.TRAINS if changes else exit_codes.OTHER_VERDICT)


class Trials:
    """Runs the experiment under one release after another, and keeps what came of each."""

    def __init__(self, client: "Client", screen: Screen, experiment: str, options: dict[str, Any]) -> None:
        self._client, self._screen = client, screen
        self._experiment, self._options = experiment, options
        self.tried: dict[str, Answer] = {}
        """By release, in the order of trying."""
        self.experiment_ids: dict[str, str] = {}
        self._earlier: dict[str, Experiment] = {}

    def take_earlier(self) -> None:
        """Look up the experiments of an earlier bisect that came to their end; of equals, the newest counts."""
        for experiment in self._client.experiments.list():
            versions = {_release_of(run) for run in experiment.runs}
            if experiment.builtin == self._experiment and len(versions) == 1 and _is_answer(experiment):
                (version,) = versions
                if version is not None:
                    self._earlier.setdefault(version, experiment)

    def answer(self, version: str) -> "Answer":
        """Run the experiment under a release.

        Raises:
            ReleaseNotTried: a machine failed and not the release; what it would have shown is not known.
        """
        if version in self._earlier:
            self._screen.progress(f"--- DeepSpeed {version}: on record, experiment {self._earlier[version].id}")
            return self._keep(version, self._earlier[version])
        self._screen.progress(f"--- DeepSpeed {version}")
        finished = self._run(version)
        if finished is None:
            self.tried[version] = {}
            return {}
        return self._keep(version, finished)

    def _run(self, version: str) -> "Experiment | None":
        """Run the experiment to its end; None where the release has none of its stages."""
        from muonscope.errors import InvalidRequest, ReleaseNotTried

        try:
            finished = follow(
                self._client,
                lambda: self._client.experiments.create_builtin(self._experiment, deepspeed=version, **self._options),
                self._screen,
            )
        except InvalidRequest as refused:
            # The release's Muon has none of the stages; a name that is wrong is wrong for every release.
            if refused.field != "deepspeed":
                raise
            self._screen.progress(str(refused))
            return None
        for run in finished.runs:
            failure = run.failure
            if exit_codes.exit_code(run) == exit_codes.STOPPED:
                self._screen.progress("stopped")
                raise typer.Exit(exit_codes.STOPPED)
            if failure is not None and failure.kind.is_infrastructure:
                raise ReleaseNotTried(version, run.id, f"{failure.kind}: {_first_line(failure.message)}")
        return finished

    def _keep(self, version: str, experiment: "Experiment") -> "Answer":
        self.experiment_ids[version] = experiment.id
        self.tried[version] = rows_of(experiment)
        return self.tried[version]


def _is_answer(experiment: "Experiment") -> bool:
    """Whether every run came to an end that the release brought about."""
    return experiment.is_finished and not any(
        exit_codes.exit_code(run) == exit_codes.STOPPED
        or (run.failure is not None and run.failure.kind.is_infrastructure)
        for run in experiment.runs
    )


def _release_of(run: "Run") -> str | None:
    return (run.spec.get("deepspeed") or {}).get("version")


def rows_of(experiment: "Experiment") -> "Answer":
    """Return an experiment's rows by their run's name, with the verdict as a column of its own."""
    from muonscope.cli.bisection import OUTCOME, VERDICT

    runs = {run.id: run for run in experiment.runs}
    table, rows = experiment.table, {}
    for run_id, cells in zip(table.run_ids, table.rows, strict=True):
        run = runs[run_id]
        row = dict(zip(table.columns, cells, strict=True))
        for column in _SAID_ELSEWHERE:
            row.pop(column, None)
        fault = _failure(run)
        row[VERDICT] = fault or (None if run.verdict is None else str(run.verdict.name))
        row[OUTCOME] = fault or row.get(OUTCOME) or row[VERDICT]
        rows[run.name] = row
    return rows


def _failure(run: "Run") -> str | None:
    """Say how a run failed that no verdict explains: a release that raises an error is an answer too."""
    if exit_codes.exit_code(run) != exit_codes.FAILURE or run.failure is None:
        return None
    return f"fails: {_first_line(run.failure.message)}"


def _first_line(message: str) -> str:
    # An error without a word has no lines at all.
    return message.partition("\n")[0]


def _range(text: str) -> tuple[str, ...]:
    """Return the releases of `FROM..TO`; an end left out is the list's own."""
    from muonscope.contract.releases import SUPPORTED_DEEPSPEED as KNOWN

    first, dots, last = text.partition("..")
    first, last = first or KNOWN[0], last or KNOWN[-1]
    for version in (first, last):
        if version not in KNOWN:
            raise typer.BadParameter(f"{version} is not a known release; choose from {', '.join(KNOWN)}")
    if not dots or KNOWN.index(first) >= KNOWN.index(last):
        raise typer.BadParameter(f"{text} is not FROM..TO with the older release first, such as 0.19.2..0.19.8")
    return KNOWN[KNOWN.index(first) : KNOWN.index(last) + 1]


def _print(
    screen: Screen, experiment: str, versions: tuple[str, ...], trials: Trials, changes: "tuple[Change, ...]"
) -> None:
    from muonscope.cli.bisection import stretches

    if screen.as_json:
        screen.json(_document(experiment, versions, trials, changes))
        return
    for change in changes:
        screen.table(
            ("run", "column", change.last_before, change.first_after),
            [(cell.run, cell.column, _text(cell.before), _text(cell.after)) for cell in change.cells],
            title=f"changed in {change.first_after}",
        )
        screen.line()
    if not changes:
        screen.line(f"no change: {versions[0]} and {versions[-1]} answer alike")
    for first, last in stretches(versions, changes) if changes else ():
        tried = [version for version in versions[versions.index(first) : versions.index(last) + 1]
                 if version in trials.tried]  # fmt: skip
        screen.line(f"{first if first == last else f'{first} to {last}'}: alike in all tried ({', '.join(tried)})")


def _document(
    experiment: str, versions: tuple[str, ...], trials: Trials, changes: "tuple[Change, ...]"
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "experiment": experiment,
        "releases": list(versions),
        "tried": [
            {"release": version, "experiment_id": trials.experiment_ids.get(version), "rows": dict(rows)}
            for version, rows in trials.tried.items()
        ],
        "changes": [asdict(change) for change in changes],
    }


def _text(cell: Any) -> str:
    from muonscope.cli.screen import NOT_MEASURED, number

    if isinstance(cell, str):
        shown = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(cell, cell)
        return textwrap.shorten(shown, _WIDEST_CELL, placeholder=" …")
    return NOT_MEASURED if cell is None else number(cell)
