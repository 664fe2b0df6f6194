"""What is kept beside the record and can be made anew from it: blocks for charts, and how far a mirror came."""

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from service.store.base import Base
from service.store.types import StoredText


class Block(Base):
    """480 steps of an attempt's rank 0 summed up for charts: derived from `step` by `blocks.py`, which can rebuild it.

    480 steps make a row that fits one page of SQLite's.
    """

    __tablename__ = "block"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its steps are 480 * number and those after it."""
    first_step: Mapped[int]
    last_step: Mapped[int]
    extremes: Mapped[bytes]
    """(series, 20 buckets of 24 steps, 2) float64 little-endian: smallest and largest finite value as they occur."""
    marks: Mapped[bytes | None]
    """zlib of a uint32 a step: 1 stored, 2 overflow, 4 discarded, 8 and more `nonfinite_mask`. Null: all are plain."""


class ParameterBlock(Base):
    """480 steps of 24 parameters' momentum norms summed up for charts: derived from `step`, once all 480 are past.

    What is not summed up yet, or was recorded before there were such blocks, is read from the steps. 24 parameters
    make a row that fits one page of SQLite's.
    """

    __tablename__ = "parameter_block"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id", ondelete="CASCADE"), primary_key=True)
    part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its parameters are 24 * part and those after it."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its steps are 480 * number and those after it."""
    extremes: Mapped[bytes]
    """(parameters, 20 buckets of 24 steps, 2) float32 little-endian: smallest and largest finite norm as they occur."""


class Mirror(Base):
    """How far a run's record is carried to another tracker."""

    __tablename__ = "mirror"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    target: Mapped[str] = mapped_column(StoredText)
    """Which tracker: another one is given the run from its beginning."""
    remote_id: Mapped[str] = mapped_column(StoredText)
    """What the tracker calls the run."""
    attempt: Mapped[int]
    """The number of the attempt whose steps are next."""
    next_step: Mapped[int]
    """The first of them that is not carried over yet."""
    revision: Mapped[int]
    """The run's, as of which everything is carried over."""
