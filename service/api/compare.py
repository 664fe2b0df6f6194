"""Two runs side by side: what differs in their specs, where their records part, and what came of it."""

from typing import Annotated, Any

from fastapi import Query

from muonscope.contract.attempts import FinalState
from service.analysis import comparison
from service.api.compare_schemas import CompareOut
from service.api.dependencies import DatabaseDependency
from service.api.responses import Router
from service.api.schemas import PROBLEMS
from service.store.models import Run
from service.store.parameters import ParameterRepository
from service.store.runs import RunRepository
from service.store.session import Session
from service.store.steps import StepRepository, reached

router = Router(tags=["compare"], responses=PROBLEMS)


@router.get("/compare", summary="Compare two runs, to the last bit")
def compare(
    database: DatabaseDependency,
    a: Annotated[str, Query(max_length=64, description="A run's id.")],
    b: Annotated[str, Query(max_length=64, description="Another run's id.")],
) -> CompareOut:
    with database.read() as session:
        runs = RunRepository(session)
        run_a, run_b = runs.get(a), runs.get(b)
        side_a, side_b = _side(session, run_a), _side(session, run_b)
        divergence = comparison.first_divergence(side_a, side_b)
        parameters: list[int] = []
        if (
            divergence is not None
            and not divergence.is_end
            and comparison.is_comparable(side_a, side_b, comparison.PER_PARAMETER)
        ):
            steps = StepRepository(session)
            norms = [steps.norms_at(run, [divergence.step]).get(divergence.step, b"") for run in (run_a, run_b)]
            parameters = comparison.differing_parameters(norms[0], norms[1])
    names = {"a": run_a.name, "b": run_b.name}
    answer: dict[str, Any] = {"a": a, "b": b, "names": names, **comparison.compare(side_a, side_b, parameters)}
    return CompareOut.model_validate(answer)


def _side(session: Session, run: Run) -> comparison.Side:
    newest = run.attempts[-1] if run.attempts else None
    final = newest.final if newest is not None else None
    # One that ended before its first step may have said nothing of itself.
    told = next((attempt for attempt in reversed(run.attempts) if attempt.stored_steps), newest)
    parameters = ParameterRepository(session).list(run)
    names = {parameter.index: parameter.name for parameter in parameters}
    return comparison.Side(
        spec=run.spec,
        columns=StepRepository(session).columns(run, comparison.SERIES, stop=reached(run)),
        momentum_unit=told.momentum_unit if told is not None else None,
        data_hash=told.data_hash if told is not None else None,
        initial_parameters_hash=told.initial_parameters_hash if told is not None else None,
        final=FinalState.model_validate(final) if final is not None else None,
        parameter_names=[names.get(index, f"parameter {index}") for index in range(max(names, default=-1) + 1)],
        routes={parameter.name: parameter.route for parameter in parameters},
    )
