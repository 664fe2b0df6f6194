"""What is said of a run that the service does not start: one that is recorded as it trains, one made elsewhere.

POST /recordings     Recording -> RecordingStarted    then the attempt's own door, as workers use it (`attempts.py`)
POST /imports/runs   RunRecord -> the run             a whole record at once, of a run that has ended
"""

from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from muonscope.contract.attempts import AttemptFacts, AttemptOutcome
from muonscope.contract.run_spec import ExternalTask, RunSpec

# Steps in one of a record's batches, so that neither side holds more than some megabytes at once.
RECORD_BATCH_STEPS: Final = 5000


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Recording(_Message):
    """A script of somebody's own that begins to be recorded."""

    spec: RunSpec
    """Its task is `external`: what an engine says of itself, not what anybody is to run."""

    @model_validator(mode="after")
    def _is_external(self) -> Self:
        if not isinstance(self.spec.task, ExternalTask):
            raise ValueError(f"spec.task.name={self.spec.task.name} is not external; submit it with POST /runs")
        return self


class RecordingStarted(_Message):
    """Where its steps go."""

    run_id: str
    attempt_id: str
    token: str
    epoch: int
    heartbeat_s: float


class RunRecord(_Message):
    """A run that has ended, whole: what `muonscope import` sends of a record file."""

    spec: RunSpec
    facts: AttemptFacts
    outcome: AttemptOutcome
    id: str = Field(min_length=1, max_length=64)
    """The run's id where it was made: sent again, it is the run that it became the first time."""
    batches: list[str] = Field(max_length=100_000)
    """Telemetry batches in the order of their steps, base64; their epoch and rank say nothing here."""
