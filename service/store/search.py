"""The run table's search language, as SQL conditions.

tiny gpt                      both words occur in the run's name, as literal text, in any case
name~gpt                      the same, said with the field
kq3hwz7mabcd                  what can be a run's id finds that run as well
status:failed,stopped         one of these
ordering:master stage:2       all conditions must hold
scale:>=2^16 steps:<100       compare numbers; 2^16 is 65536
tag:"night run"               quotes keep a space
"""

import re
import shlex
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, exists, or_, select

from muonscope.contract.status import FailureKind, Implementation, RunStatus, StepOrdering, Verdict
from service.errors import InvalidInput
from service.store.models import Experiment, Run, RunSummary, RunTag
from service.store.types import lowered, storable_text

MAX_QUERY_LENGTH: Final = 1000
_LARGEST: Final = 2.0**62
# As `runs.new_uid` makes them. A name may hold such a word as well.
_AN_ID: Final = re.compile(r"[a-z2-7]{12}")

_WORDS: Final[dict[str, tuple[Any, type[StrEnum]]]] = {
    "status": (Run.status, RunStatus),
    "verdict": (Run.verdict, Verdict),
    "ordering": (Run.step_ordering, StepOrdering),
    "impl": (Run.implementation, Implementation),
    "failure": (Run.failure_kind, FailureKind),
}
_NUMBERS: Final[dict[str, Any]] = {
    "stage": Run.zero_stage,
    "scale": Run.initial_scale,
    "world": Run.world_size,
    "steps": Run.steps,
    "priority": Run.priority,
    "overflows": RunSummary.overflows,
    "discarded": RunSummary.discarded,
}


def _named_like(value: str) -> ColumnElement[bool]:
    if value.isascii():
        return Run.name.icontains(value, autoescape=True)
    return lowered(Run.name).contains(value.lower(), autoescape=True)


_TEXTS: Final[dict[str, Callable[[str], ColumnElement[bool]]]] = {
    "tag": lambda value: exists().where(RunTag.run_id == Run.id, RunTag.tag == value),
    "task": lambda value: Run.task == value,
    "name": _named_like,
    "id": lambda value: Run.uid == storable_text(value),
    "fingerprint": lambda value: Run.fingerprint.startswith(storable_text(value), autoescape=True),
    "experiment": lambda value: Run.experiment_id.in_(
        select(Experiment.id).where(Experiment.uid == storable_text(value))
    ),
}
FIELDS: Final = tuple(sorted([*_WORDS, *_NUMBERS, *_TEXTS]))
_OPERATORS: Final[dict[str, Callable[[Any, float], ColumnElement[bool]]]] = {
    ">=": lambda column, number: column >= number,
    "<=": lambda column, number: column <= number,
    ">": lambda column, number: column > number,
    "<": lambda column, number: column < number,
    "=": lambda column, number: column == number,
}


def conditions(query: str) -> list[ColumnElement[bool]]:
    """Translate a search into conditions on Run joined with RunSummary, all of which must hold.

    Raises:
        InvalidInput: an unknown field, a word that is none of the field's, or something that is not a number.
    """
    if len(query) > MAX_QUERY_LENGTH:
        raise InvalidInput(
            f"the search has {len(query)} characters", field="q", remedy=f"use at most {MAX_QUERY_LENGTH}"
        )
    return [_condition(token) for token in _tokens(query)]


def _tokens(query: str) -> list[str]:
    lexer = shlex.shlex(query, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters, lexer.escape, lexer.quotes = True, "", "", '"'
    try:
        return list(lexer)
    except ValueError as error:
        raise InvalidInput("a quote is not closed", field="q", value=query, remedy='close it with "') from error


def _condition(token: str) -> ColumnElement[bool]:
    matched = re.fullmatch(r"([a-z_]+)([:~])(.*)", token, re.DOTALL)
    if matched is None and _AN_ID.fullmatch(token):
        return or_(_TEXTS["name"](token), _TEXTS["id"](token))
    if matched is None:
        return _TEXTS["name"](token)
    field, _, value = matched.groups()
    if field not in FIELDS:
        raise InvalidInput(
            f"{field} is not a field of the search",
            field="q",
            value=token,
            remedy=f"use one of {', '.join(FIELDS)}, or quote free text",
        )
    if not value.strip(","):
        raise InvalidInput(f"{field} has no value", field="q", value=token, remedy=f"write {field}:value")
    if field in _NUMBERS:
        return _number_condition(field, value)
    if field in _WORDS:
        return _word_condition(field, value)
    return or_(*(_TEXTS[field](part) for part in value.split(",") if part)) if "," in value else _TEXTS[field](value)


def _word_condition(field: str, value: str) -> ColumnElement[bool]:
    column, enum = _WORDS[field]
    known = {member.value for member in enum}
    wanted = value.split(",")
    for word in wanted:
        if word not in known:
            raise InvalidInput(
                f"{field} is never {word}",
                field="q",
                value=f"{field}:{value}",
                remedy=f"use one of {', '.join(sorted(known))}",
            )
    condition: ColumnElement[bool] = column.in_([enum(word) for word in wanted])
    return condition


def _number_condition(field: str, value: str) -> ColumnElement[bool]:
    matched = re.fullmatch(r"(>=|<=|>|<|=)?(?:(\d+)\^(\d+)|([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?))", value)
    if matched is not None:
        operator, base, power, plain = matched.groups()
        number = _power(int(base), int(power)) if base is not None else float(plain)
        if abs(number) <= _LARGEST:
            return _OPERATORS[operator or "="](_NUMBERS[field], number)
    raise InvalidInput(
        f"{value} is not a number that {field} can have",
        field="q",
        value=f"{field}:{value}",
        remedy=f"write {field}:16, {field}:>=2^16 or {field}:<100",
    )


def _power(base: int, power: int) -> float:
    try:
        return float(base) ** power
    except OverflowError:
        return float("inf")
