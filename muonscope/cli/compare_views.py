"""How the comparison of two runs looks: first the answer, then what supports it."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from muonscope.cli.screen import NOT_MEASURED, counted, number
from muonscope.contract.numbers import apart

if TYPE_CHECKING:
    from muonscope.client import Comparison

_DIGITS: Final = 4
_WORDS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_NAMED: Final = 3
_TAKEN: Final = {"muon": "Muon's", "adamw": "AdamW's", "frozen": "frozen"}
_BY_ANOTHER: Final = "another optimizer's"
_CLIPPED: Final = {"muon_exempt": "gradient of what AdamW takes"}
_FIGURES: Final = (
    ("steps", "final", "steps"),
    ("discarded steps", "discarded", ""),
    ("overflows", "discarded", "overflows"),
    ("first loss scale", "loss_scale", "initial"),
    ("last loss scale", "loss_scale", "final"),
    ("lowest loss scale", "loss_scale", "lowest"),
    ("highest loss scale", "loss_scale", "highest"),
    ("changes of the loss scale", "loss_scale", "num_changes"),
    ("last loss", "final", "loss"),
    ("last momentum norm", "final", "momentum_norm"),
    ("parameters", "final", "parameters_total"),
    ("parameters moved", "final", "parameters_moved"),
    ("non-finite parameters", "final", "nonfinite_parameters"),
    ("largest weight motion", "final", "max_weight_motion"),
    ("median step time in s", "cost", "step_time_s"),
    ("peak memory in bytes", "cost", "peak_memory_bytes"),
    ("Newton-Schulz calls", "cost", "ns_calls"),
)
"""What the table shows, as (its words, the group that the service gives it in, its name there)."""


def run_heads(comparison: "Comparison") -> tuple[str, str]:
    """What heads the two runs' columns: their names, and the ids that tell runs of one name apart."""
    runs = {"a": comparison.a, "b": comparison.b}
    heads = [
        f"{comparison.names[side]} ({run_id})" if side in comparison.names else run_id for side, run_id in runs.items()
    ]
    return heads[0], heads[1]


def answer_lines(comparison: "Comparison") -> list[str]:
    """Where and why the records part and which run learned better, in words."""
    lines = [comparison.explanation] if comparison.explanation else []
    if comparison.bit_equal_until:
        lines.append(f"bit-equal until step {comparison.bit_equal_until}")
    lines += _divergence_lines(comparison)
    lines += [
        f"{_words(each.quantity)} is {each.a} in A and {each.b} in B: not compared" for each in comparison.not_compared
    ]
    return lines + _route_lines(comparison) + _clipping_lines(comparison) + _learning_lines(comparison)


def spec_rows(comparison: "Comparison") -> list[list[str]]:
    return [[each.field, *_pair(each.a, each.b)] for each in comparison.spec_difference]


def figure_rows(comparison: "Comparison") -> list[list[str]]:
    """Every figure that the service gives for both runs; what neither run has is left out."""
    has_scale = any(value is not None for value in _sides(comparison.loss_scale, "initial"))
    rows = [
        [words, *_pair(*_sides(getattr(comparison, group), name))]
        for words, group, name in _FIGURES
        if has_scale or group != "loss_scale"
    ]
    a, b = comparison.learning.a, comparison.learning.b
    lowest, means = _pair(a.lowest, b.lowest), _pair(a.mean_of_last, b.mean_of_last)
    at = [f" at step {side.lowest_step}" if side.lowest_step is not None else "" for side in (a, b)]
    over = [f" over {counted(side.mean_of_last_steps, 'step')}" if side.mean_of_last_steps else "" for side in (a, b)]
    place = next(index for index, row in enumerate(rows) if row[0] == "last loss") + 1
    rows[place:place] = [
        ["lowest loss of applied steps", *(text + step for text, step in zip(lowest, at, strict=True))],
        ["mean loss of the last 10 % applied", *(text + steps for text, steps in zip(means, over, strict=True))],
    ]
    unlike = {_words(each.quantity) for each in comparison.not_compared}
    return [
        [f"{words} (not compared)" if words.removeprefix("last ") in unlike else words, a, b]
        for words, a, b in rows
        if (a, b) != (NOT_MEASURED, NOT_MEASURED)
    ]


def _divergence_lines(comparison: "Comparison") -> list[str]:
    found = comparison.first_divergence
    if found is None:
        return []
    where = f"; the momentum differs most in {found.parameter}" if found.parameter else ""
    return [
        f"first divergence: step {found.step}, {_words(found.scalar)}: {' | '.join(_pair(found.a, found.b))}{where}"
    ]


def _route_lines(comparison: "Comparison") -> list[str]:
    """Say which parameters not the same optimizer takes: what differs then is not the ordering's alone."""
    groups: dict[tuple[str, str], list[str]] = {}
    differing = comparison.routes.differing if comparison.routes is not None else []
    for each in differing:
        groups.setdefault((each.a, each.b), []).append(each.parameter)
    lines = []
    for (a, b), names in groups.items():
        few = names if len(names) <= _MOST_NAMED + 1 else [*names[:_MOST_NAMED], f"{len(names) - _MOST_NAMED} more"]
        listed = few[0] if len(few) == 1 else f"{', '.join(few[:-1])} and {few[-1]}"
        taken_a, taken_b = _TAKEN.get(a, _BY_ANOTHER), _TAKEN.get(b, _BY_ANOTHER)
        lines.append(f"{listed} {'is' if len(names) == 1 else 'are'} {taken_a} in A and {taken_b} in B")
    if comparison.routes is not None and comparison.routes.num_differing > len(differing):
        lines.append(f"{comparison.routes.num_differing} parameters are not the same optimizer's in both")
    return lines


def _clipping_lines(comparison: "Comparison") -> list[str]:
    lines = []
    for side, found in comparison.clipping.items():
        if found is not None:
            what = _CLIPPED.get(found.scope, found.scope)
            acted = "an unrecorded number" if found.acted is None else number(found.acted)
            lines.append(
                f"{side.upper()}'s {what} was clipped to {number(found.limit)} "
                f"in {acted} of {found.applied} applied steps"
            )
    return lines


def _learning_lines(comparison: "Comparison") -> list[str]:
    lower, caveat = comparison.learning.lower, comparison.learning.caveat
    if lower is None:
        return []
    line = f"{lower.side.upper()}'s loss is lower from step {lower.from_step} on, to step {lower.until_step}"
    return [f"{line}. {caveat}" if caveat else line]


def _words(name: str) -> str:
    return name.replace("grad_", "gradient_").replace("_", " ")


def _sides(group: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Find both runs' values of a figure: its sides lie in it, or it lies in the group's."""
    at = group.get(name) if name else group
    if isinstance(at, Mapping) and "a" in at and "b" in at:
        return at["a"], at["b"]
    a, b = (side if isinstance(side, Mapping) else {} for side in (group.get("a"), group.get("b")))
    return a.get(name), b.get(name)


def _pair(a: Any, b: Any) -> tuple[str, str]:
    """Write two values, with the digits that tell them apart."""
    texts = _text(a), _text(b)
    a, b = _WORDS.get(a, a) if isinstance(a, str) else a, _WORDS.get(b, b) if isinstance(b, str) else b
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    if are_numbers and texts[0] == texts[1] and a != b and math.isfinite(a) and math.isfinite(b):
        return apart(a, b, _DIGITS)
    return texts


def _text(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, int | float):
        return number(value, _DIGITS)
    if isinstance(value, str):
        return number(_WORDS[value]) if value in _WORDS else value
    return json.dumps(value, ensure_ascii=False)
