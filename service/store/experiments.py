"""Experiments: a question and the runs that answer it."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from muonscope.contract.run_spec import RunSpec
from muonscope.contract.status import RunStatus
from service.errors import NotFound
from service.store.models import Experiment, Run
from service.store.runs import RunRepository, new_uid
from service.store.types import read_clock, storable_text


def experiment_status(runs: Mapping[RunStatus, int]) -> str:
    """Say where an experiment stands: queued, running, succeeded (every run has an outcome) or stopped."""
    total = sum(runs.values())
    # Of one whose runs were all deleted none is waited for.
    if total and runs.get(RunStatus.QUEUED, 0) == total:
        return RunStatus.QUEUED.value
    if any(count for status, count in runs.items() if not status.is_terminal):
        return RunStatus.RUNNING.value
    return RunStatus.STOPPED.value if runs.get(RunStatus.STOPPED, 0) else RunStatus.SUCCEEDED.value


class ExperimentRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        name: str,
        specs: Sequence[RunSpec],
        *,
        base: dict[str, Any],
        matrix: dict[str, Any],
        builtin: str | None = None,
        who: str = "api",
    ) -> Experiment:
        """Store an experiment and queue its runs, in the order given."""
        experiment = Experiment(
            uid=new_uid(), name=name, builtin=builtin, base=base, matrix=matrix, created_at=read_clock(self._session)
        )
        self._session.add(experiment)
        self._session.flush()
        runs = RunRepository(self._session)
        for position, spec in enumerate(specs):
            runs.create(
                spec, experiment=experiment, position=position, who=who, why=f"experiment {name}", submitted_by=who
            )
        return experiment

    def get(self, uid: str) -> Experiment:
        """Return the experiment of this id; raises NotFound."""
        experiment = self._session.scalars(select(Experiment).where(Experiment.uid == storable_text(uid))).one_or_none()
        if experiment is None:
            raise NotFound(
                f"there is no experiment {uid[:64]!r}", field="id", value=uid, remedy="list them with GET /experiments"
            )
        return experiment

    def runs(self, experiment: Experiment) -> Sequence[Run]:
        """List the experiment's runs in the order of its matrix, loaded as RunRepository loads them."""
        runs = RunRepository(self._session)
        page = runs.list(experiment=experiment, sort="created_at", limit=1000)
        found = list(page.runs)
        while page.next_cursor is not None:
            page = runs.list(experiment=experiment, sort="created_at", limit=1000, cursor=page.next_cursor)
            found.extend(page.runs)
        return sorted(found, key=lambda run: (run.position or 0, run.id))

    def list(self, *, before: int | None = None, limit: int = 50) -> Sequence[Experiment]:
        """List experiments, newest first.

        Args:
            before: the row id to continue before, from the last one of the page before.
            limit: how many.
        """
        query = select(Experiment).order_by(Experiment.id.desc()).limit(limit)
        if before is not None:
            query = query.where(Experiment.id < before)
        return self._session.scalars(query).all()
