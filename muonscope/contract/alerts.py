"""AlertRule: which runs somebody wants to hear of, and where the message goes."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from muonscope.contract.run_spec import MAX_NAME_LENGTH, Integer, PlainText, Real, plain_text
from muonscope.contract.status import RunStatus, Verdict

MAX_URL_LENGTH = 2000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class VerdictCondition(_Part):
    """A run has ended with one of these verdicts."""

    kind: Literal["verdict"] = "verdict"
    verdicts: tuple[Verdict, ...] = Field(min_length=1, max_length=len(Verdict))


class StatusCondition(_Part):
    """A run has come to one of these statuses."""

    kind: Literal["status"] = "status"
    statuses: tuple[RunStatus, ...] = Field(min_length=1, max_length=len(RunStatus))


class DiscardedShareCondition(_Part):
    """Of a run's recorded steps, more than this share was discarded; told once a run."""

    kind: Literal["discarded_share"] = "discarded_share"
    share: Real = Field(ge=0, lt=1)
    after_steps: Integer = Field(10, ge=1)
    """The fewest recorded steps that say something."""


class SilenceCondition(_Part):
    """A running run has had no new step stored for this long; told once a silence."""

    kind: Literal["silence"] = "silence"
    seconds: Real = Field(ge=1, le=30 * 86400)


Condition = Annotated[
    VerdictCondition | StatusCondition | DiscardedShareCondition | SilenceCondition, Field(discriminator="kind")
]


class AlertRule(_Part):
    """What to watch for, and who is told."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    url: Annotated[str, Field(min_length=1, max_length=MAX_URL_LENGTH)]
    """Where the message is posted. What follows the host is shown to nobody again: it may hold a key."""
    when: Condition
    tag: PlainText | None = None
    """Only runs that carry this tag; null watches all."""

    @field_validator("name", "url", "tag")
    @classmethod
    def _text_is_plain(cls, value: str | None) -> str | None:
        return None if value is None else plain_text(value)
