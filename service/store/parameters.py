"""Parameters: which there are in a run's model, and which optimizer takes each, with the reason."""

from collections.abc import Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from muonscope.contract.attempts import ParameterFact
from service.errors import InvalidInput, NotFound
from service.store.models import Parameter, Run


class ParameterRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def replace(self, run_id: int, parameters: Sequence[ParameterFact]) -> None:
        """Keep these as the run's parameters: a later attempt builds the same model anew.

        Raises:
            InvalidInput: an index that is negative, too large or given twice.
        """
        indexes: set[int] = set()
        for fact in parameters:
            if fact.index in indexes or not 0 <= fact.index < 2**31:
                raise InvalidInput(
                    f"parameter index {fact.index} of {fact.name[:100]!r} is given twice or out of range",
                    field="parameters.index",
                    value=fact.index,
                    remedy="number the parameters from 0",
                )
            indexes.add(fact.index)
        self._session.execute(delete(Parameter).where(Parameter.run_id == run_id))
        if parameters:
            self._session.execute(
                insert(Parameter),
                [
                    {
                        "run_id": run_id,
                        "index": fact.index,
                        "name": fact.name,
                        "shape": list(fact.shape),
                        "route": fact.route,
                        "reason": fact.reason,
                    }
                    for fact in parameters
                ],
            )

    def list(self, run: Run) -> Sequence[Parameter]:
        query = select(Parameter).where(Parameter.run_id == run.id).order_by(Parameter.index)
        return self._session.scalars(query).all()

    def get(self, run: Run, index: int) -> Parameter:
        """Return the run's parameter at this index; raises NotFound."""
        if 0 <= index < 2**31:
            parameter = self._session.get(Parameter, (run.id, index))
            if parameter is not None:
                return parameter
        raise NotFound(
            f"run {run.uid} has no parameter {index}",
            field="index",
            value=index,
            remedy=f"list them with GET /runs/{run.uid}/parameters",
        )
