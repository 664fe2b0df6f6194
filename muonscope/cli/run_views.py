"""How runs, steps and comparisons look in a terminal. These read and format; they decide nothing."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from muonscope.cli import exit_codes
from muonscope.cli.screen import NOT_MEASURED, counted, number
from muonscope.contract.status import Finding

if TYPE_CHECKING:
    from muonscope.client import Parameter, Run, Step

RUN_COLUMNS: Final = ("run", "name", "status", "verdict", "steps", "overflows", "discarded", "scale", "moved", "age")
ATTEMPT_COLUMNS: Final = ("attempt", "status", "failure", "steps", "first step after", "ray job")
RANK_COLUMNS: Final = ("rank", "node", "device", "GPU", "local rank", "pid")
PARAMETER_COLUMNS: Final = ("parameter", "shape", "route", "why")


def run_row(run: "Run") -> list[str]:
    from muonscope.contract.spec_facts import has_loss_scale

    summary = run.summary
    return [
        run.id,
        run.name,
        ended_status(run),
        verdict(run),
        _steps(run, "/"),
        number(summary.overflows),
        number(summary.discarded),
        number(summary.final_loss_scale) if has_loss_scale(run.spec) else NOT_MEASURED,
        moved(run),
        age(run.created_at),
    ]


def status(run: "Run") -> str:
    if run.queue_position:
        return f"{run.status}, position {run.queue_position}"
    return str(run.status)


def ended_status(run: "Run") -> str:
    """The status where there is no other place for what a run failed of: `failed: worker_died`."""
    return f"{status(run)}: {fault_kind(run)}" if fault_kind(run) else status(run)


def verdict(run: "Run") -> str:
    """The verdict with the step it hangs on: `dies, step 17`."""
    if run.verdict is None:
        return NOT_MEASURED
    step = "" if run.verdict.step is None else f", step {run.verdict.step}"
    return f"{run.verdict.name}{step}"


def moved(run: "Run") -> str:
    summary = run.summary
    if summary.parameters_moved is None or summary.parameters_total is None:
        return NOT_MEASURED
    return f"{summary.parameters_moved}/{summary.parameters_total}"


def age(then: datetime | None) -> str:
    if then is None:
        return NOT_MEASURED
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return duration((datetime.now(UTC) - then).total_seconds())


def duration(seconds: float) -> str:
    """Write a duration with one or two units: 4.2 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def outcome_line(run: "Run") -> str:
    """One sentence for the end of a run."""
    summary = run.summary
    parts = [f"{run.name}: {run.status}"]
    if run.verdict is not None:
        parts.append(verdict(run))
    parts.append(f"{number(summary.applied)} applied, {counted(summary.discarded, 'discarded step')}")
    parts.append(f"{moved(run)} parameters moved")
    if any(finding.name == Finding.NO_MUON for finding in run.findings):
        # It trains all the same, by AdamW alone: who asks about Muon must not take that for an answer.
        parts.append("no parameter is trained by Muon")
    if fault := fault_line(run):
        parts.append(fault)
    return "; ".join(parts)


_NOT_OWN: Final = ("/site-packages/", "/lib/python", "/workers/", "/muon_core/", "<frozen ")


def fault_kind(run: "Run") -> str:
    """What a run failed of that did not die of its numbers; nothing of any other."""
    return "" if run.failure is None or exit_codes.is_verdict(run.failure) else str(run.failure.kind)


def fault_line(run: "Run") -> str:
    """Why a run failed that did not die of its numbers, in one line; nothing of any other."""
    if not fault_kind(run):
        return ""
    # Tracebacks and the like come after the first line; `muonscope show` has them.
    return _failure(run).partition("\n")[0]


def last_frames(run: "Run") -> list[str]:
    """Where an error of a run's own code was raised: the traceback's end, each frame with what stands there.

    It begins at the last frame that lies neither in an installed library nor in Muonscope, which may have been handed
    what it stumbles over; frames between that one and the last two are left out.
    """
    lines = run.failure.message.splitlines() if run.failure is not None else []
    frames = [place for place, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return []
    last = frames[-2:]
    own = [place for place in frames if not any(part in lines[place].partition(",")[0] for part in _NOT_OWN)]
    if not own or own[-1] >= last[0]:
        return lines[last[0] :]
    after = frames[frames.index(own[-1]) + 1]
    left_out = last[0] - after
    return [*lines[own[-1] : after], *(["  ..."] if left_out else []), *lines[last[0] :]]


def run_facts(run: "Run") -> list[tuple[str, str]]:
    """Everything `muonscope show` says above its tables."""
    spec, summary = run.spec, run.summary
    facts = [
        ("run", run.id),
        ("name", run.name),
        ("status", status(run)),
        ("waiting for", run.waiting_reason or ""),
        ("verdict", verdict(run) if run.verdict else ""),
        ("evidence", run.verdict.evidence if run.verdict else ""),
        *(
            ("finding", f"{finding.name}: {finding.evidence}")
            for finding in run.findings
            if run.verdict is None or finding.name != run.verdict.name
        ),
        ("failure", _failure(run)),
        *_optimizer_facts(spec),
        ("set-up", _setup(spec)),
        ("labels", ", ".join(_labels(run))),
        (
            "steps",
            f"{_steps(run, ' of ')}: {number(summary.applied)} applied, "
            f"{number(summary.discarded)} discarded, {counted(summary.overflows, 'overflow')}",
        ),
        ("loss scale", _scales(run)),
        ("clipping", _clipping(spec)),
        ("moved", f"{moved(run)}, largest weight motion {number(summary.max_weight_motion)}"),
        (
            "momentum",
            f"{'finite' if summary.momentum_finite else 'not finite'}, norm {number(summary.last_momentum_norm)}"
            if summary.momentum_finite is not None
            else "",
        ),
        ("last loss", number(summary.last_loss)),
        ("fingerprint", run.fingerprint[:16]),
        ("experiment", run.experiment_id or ""),
        ("tags", ", ".join(run.tags)),
        ("created", f"{age(run.created_at)} ago" if run.created_at else ""),
    ]
    return [(name, text) for name, text in facts if text]


def attempt_rows(run: "Run") -> list[list[str]]:
    rows = []
    for attempt in run.attempts:
        stored = f"{number(attempt.stored_steps)}/{number(attempt.declared_steps)}"
        failure = attempt.failure.kind if attempt.failure else ""
        rows.append(
            [
                str(attempt.number),
                attempt.status,
                failure,
                stored,
                _first_step(attempt.phases),
                attempt.ray_job or NOT_MEASURED,
            ]
        )
    return rows


def rank_rows(run: "Run") -> list[list[str]]:
    """The newest attempt's ranks: where each runs, and the one device it sees."""
    ranks = run.attempts[-1].ranks if run.attempts else []
    columns = ("rank", "node", "device", "device_id", "local_rank", "pid")
    return [[NOT_MEASURED if rank.get(name) is None else str(rank[name]) for name in columns] for rank in ranks]


def parameter_rows(parameters: Iterable["Parameter"]) -> list[list[str]]:
    return [
        [each.name, "×".join(str(size) for size in each.shape) or "scalar", each.route, each.reason]
        for each in parameters
    ]


def step_table(run: "Run", steps: Iterable["Step"]) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of steps; of a precision without a loss scale none is shown."""
    from muonscope.contract.spec_facts import has_loss_scale

    cells: dict[str, Callable[[Step], str]] = {
        "step": lambda step: str(step.step),
        "overflow": lambda step: "overflow" if step.overflow else "",
        "discarded": lambda step: "discarded" if step.discarded else "",
        "loss scale": lambda step: f"{number(step.loss_scale_before)} → {number(step.loss_scale_after)}",
        "loss": lambda step: number(step.loss),
        "gradient norm": lambda step: number(step.grad_norm),
        "momentum norm": lambda step: number(step.momentum_norm),
    }
    if not has_loss_scale(run.spec):
        del cells["loss scale"]
    return list(cells), [[cell(step) for cell in cells.values()] for step in steps]


def phase_lines(run: "Run") -> list[str]:
    """What each attempt's time until its first step, and after its last one, went into."""
    lines = []
    for attempt in run.attempts:
        ordered = sorted(attempt.phases.items(), key=lambda phase: phase[1])
        spent = ", ".join(f"{name} {at - before:.1f} s" for (_, before), (name, at) in pairwise(ordered))
        if spent:
            lines.append(f"attempt {attempt.number}: {spent}")
    return lines


def _first_step(phases: dict[str, float]) -> str:
    if "submitted" not in phases or "first_step" not in phases:
        return NOT_MEASURED
    return f"{phases['first_step'] - phases['submitted']:.1f} s"


def _steps(run: "Run", of: str) -> str:
    """The steps recorded, and those planned; of a recorded script that said none, only those that came are known."""
    is_open_ended = (run.spec.get("task") or {}).get("is_open_ended")
    return number(run.summary.steps) + ("" if is_open_ended else f"{of}{run.spec.get('steps', '?')}")


def _optimizer_facts(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """What moves the weights, and when its momentum moves: an order of steps is a Muon's alone."""
    from muonscope.contract.spec_facts import has_muon_optimizer, recorded_optimizer

    optimizer, implementation = recorded_optimizer(spec), spec.get("implementation")
    ordering = ("ordering", f"{spec.get('step_ordering')} on {implementation}")
    if optimizer is None:
        return [ordering]
    script = (spec.get("task") or {}).get("script")
    recorded = f", in a recorded script{f', {script}' if script else ''}"
    if has_muon_optimizer(spec):
        return [ordering, ("optimizer", optimizer + recorded)]
    return [("optimizer", f"{optimizer} on {implementation}{recorded}")]


def _scales(run: "Run") -> str:
    """The loss scale at the beginning and now; DeepSpeed's 1 of a precision that has none is nobody's."""
    from muonscope.contract.spec_facts import has_loss_scale

    if not has_loss_scale(run.spec):
        return f"none ({run.spec.get('precision')})"
    scale = run.spec.get("loss_scale") or {}
    static = scale.get("static")
    initial = static if static is not None else 2.0 ** scale.get("initial_power", 16)
    return f"{number(initial)} → {number(run.summary.final_loss_scale)}"


def _clipping(spec: dict[str, Any]) -> str:
    from muonscope.contract.spec_facts import clip_scope

    limit = spec.get("gradient_clipping")
    return f"{number(limit)}, of the {clip_scope(spec)}" if limit else ""


def _setup(spec: dict[str, Any]) -> str:
    task = (spec.get("task") or {}).get("name", "?")
    return (
        f"{task}, ZeRO stage {spec.get('zero_stage')}, world size {spec.get('world_size')}, {spec.get('precision')}, "
        f"lr {number((spec.get('optimizer') or {}).get('lr'))}"
    )


def _labels(run: "Run") -> list[str]:
    """What the newest attempt is not on the hardware it speaks of, such as `fp16 emulated on CPU`."""
    labels = run.attempts[-1].environment.get("labels") if run.attempts else None
    return [str(label) for label in labels] if isinstance(labels, list) else []


def _failure(run: "Run") -> str:
    if run.failure is None:
        return ""
    rank = "" if run.failure.rank is None else f" (rank {run.failure.rank})"
    return f"{run.failure.kind}{rank}: {run.failure.message}".rstrip(": ")
