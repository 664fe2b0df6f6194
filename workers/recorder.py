"""Watches a training loop that is not ours: each `engine.step()` of a DeepSpeed engine becomes one step record.

The engine's `step` and `backward` are stood in for while the recorder is at work: they do what they did, and the
measurements are the ones that our own loop takes (`workers.probes`). Nothing that trains is changed: the weights of a
recorded loop are those of the loop alone, to the last bit.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from muon_core.parameters import trainable_parameters
from muon_core.zero.deepspeed_native import NativeMuon
from muon_core.zero.layout import Attachment
from muon_core.zero.optimizer import ZeroMuon
from muon_core.zero.precision import is_exhaustion, read_outcome
from muon_core.zero.watching import WatchedOptimizer, watch_engine
from muonscope.contract.attempts import AttemptFacts, FinalState, ParameterFact, RankFact
from muonscope.contract.releases import DEFAULT_DEEPSPEED, RELEASES, Release
from muonscope.contract.run_spec import MAX_STEPS, ExternalTask, LossScale, RunSpec
from muonscope.contract.status import (
    Implementation,
    MomentumUnit,
    ParameterRoute,
    Phase,
    Precision,
    StepOrdering,
)
from muonscope.contract.telemetry import StepRecord
from workers.engine import describe_engine, device_name, native_routes, our_routes
from workers.final_state import InitialWeights, hash_parameters, peak_memory_bytes, trainable_numel
from workers.probes import Measured, Probes
from workers.recorded_optimizer import optimizer_settings
from workers.slow_start import AFTER_S, SlowStart

logger = logging.getLogger(__name__)

# Hashing more than this takes seconds of a training script's time: it is left out, and said to be not measured.
MAX_HASHED_ELEMENTS: Final = 2**28
# How long a rank at the end of the block waits for those that are still in it.
COME_LIMIT_S: Final = 600.0
_AT_FIRST: Final = (
    "muonscope: the first step is still under way after {s:g} s. {who} may be compiling in it, which takes minutes "
    "where cores are few; the training goes on by itself."
)
_PRECISIONS: Final = {torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16}


class Recorder:
    """Records one engine's steps between `start` and `stop`. Collective: every rank has one."""

    def __init__(self, engine: Any, keep: Callable[[StepRecord], None]) -> None:
        """Look at the engine; nothing is recorded yet. Collective.

        Args:
            engine: as `deepspeed.initialize` returned it.
            keep: takes each record; called on every rank.
        Raises:
            UnsupportedSetup: an engine whose momentum cannot be read; the message says what to change.
        """
        self._engine, self._keep = engine, keep
        self.attachment: Attachment = watch_engine(engine)
        self.rank = dist.get_rank()
        world_size = dist.get_world_size()
        self.group = dist.new_group() if world_size > 1 else None
        self.parameters = [parameter for _, parameter in trainable_parameters(engine.module)]
        self.routes = _routes(engine, self.attachment)
        self._muon = [fact.index for fact in self.routes if fact.route is ParameterRoute.MUON]
        # Another optimizer's momentum is all there is; a Muon's that takes no parameter is none.
        is_watched = isinstance(self.attachment, WatchedOptimizer)
        indices = range(len(self.parameters)) if is_watched else self._muon
        self._probes = Probes(engine, self.parameters, indices, self.group)
        self._initial = InitialWeights(self.parameters, None, self.rank, world_size)
        self.step = 0
        """The step being attempted."""
        self.is_exhausted = False
        """Whether a step found the loss scale at its minimum: all ranks end at the same one."""
        self.initial_hash = self._hash()
        self._ns_calls_seen = self.attachment.ns_calls
        self._loss_sum: Tensor | None = None
        self._num_unscaled = 0
        self._last_step_at = time.perf_counter()
        who = "DeepSpeed's own Muon" if isinstance(self.attachment, NativeMuon) else "What compiles itself at first use"
        self._slow_start = SlowStart(_AT_FIRST.format(s=AFTER_S, who=who), after_s=AFTER_S)

    def start(self) -> None:
        """Stand in for the engine's `step` and `backward`."""
        self._step, self._backward = self._engine.step, self._engine.backward
        self._found = {name: vars(self._engine)[name] for name in ("step", "backward") if name in vars(self._engine)}
        self._engine.step, self._engine.backward = self._recorded_step, self._recorded_backward
        self._last_step_at = time.perf_counter()

    def stop(self) -> None:
        """Leave the engine as it was found, and keep the record that is still under way."""
        for name in ("step", "backward"):
            vars(self._engine).pop(name, None)
        vars(self._engine).update(self._found)
        last = self._probes.flush()
        if last is not None:
            self._keep(last)

    def do_all_come(self, comes: bool) -> bool:
        """Whether every rank goes on to `final_state`. Called on every rank; one that does not come waits for none.

        Asked at the store where the ranks have met: a collective would wait for a rank that has left alone.
        """
        if self.group is None:
            return comes
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"muonscope-{self.group.group_name}", _get_default_store()
        )
        try:
            if not comes:
                store.set("left", "")
            if store.add("ranks", 1) == dist.get_world_size():
                store.set("all", "")
            deadline, pause = time.monotonic() + COME_LIMIT_S, 0.001
            while comes and not store.check(["all"]):
                if time.monotonic() > deadline:
                    logger.warning("some ranks are still in the block", extra={"action": "ranks_not_there"})
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            return comes and not store.check(["left"])
        except RuntimeError:
            # The rank that keeps the store is gone.
            return False

    def final_state(self) -> FinalState:
        """Say what has moved since the recorder was made. Collective."""
        compared = self._initial.compare(self._muon, self.group)
        measured = {"final_parameters_hash": self._hash(), "peak_memory_bytes": peak_memory_bytes(self._engine.device)}
        return FinalState(**{**dict(compared), **measured})

    def facts(self) -> AttemptFacts:
        """Say what is recorded: parameters and their routes, place, versions, DeepSpeed's configuration."""
        is_native = isinstance(self.attachment, NativeMuon)
        return AttemptFacts(
            phases={Phase.INITIALIZED: time.time()},
            parameters=self.routes,
            ranks=[
                RankFact(
                    rank=self.rank, node=socket.gethostname(), pid=os.getpid(),
                    device=device_name(self._engine.device), local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                )
            ],
            momentum_unit=MomentumUnit.LOSS_SCALED if is_native else MomentumUnit.UNSCALED,
            initial_parameters_hash=self.initial_hash,
            environment=describe_engine(self._engine, _precision(self._engine)),
            resolved_ds_config=dict(self._engine.config),
        )  # fmt: skip

    def _hash(self) -> str | None:
        if trainable_numel(self.parameters) > MAX_HASHED_ELEMENTS:
            return None
        return hash_parameters(self.parameters, is_first=self.rank == 0)

    def _recorded_backward(self, loss: Any, *args: Any, **options: Any) -> Any:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            seen = loss.detach().double().view(())
            self._loss_sum = seen if self._loss_sum is None else self._loss_sum + seen
            # Hugging Face's Trainer divides by the step's micro-batches, or tokens, itself: its losses are shares.
            is_share = options.get("scale_wrt_gas", args[1] if len(args) > 1 else True) is False
            self._num_unscaled += not is_share
        with self._told_if_slow():
            return self._backward(loss, *args, **options)

    def _told_if_slow(self) -> AbstractContextManager[None]:
        return self._slow_start.watch() if self.rank == 0 and self.step == 0 else nullcontext()

    def _recorded_step(self, *args: Any, **options: Any) -> Any:
        engine = self._engine
        is_boundary = bool(engine.is_gradient_accumulation_boundary())
        if not is_boundary:
            with self._told_if_slow():
                return self._step(*args, **options)
        loss_scale_before = float(engine.optimizer.loss_scale)
        lr = float(engine.optimizer.param_groups[0]["lr"])
        try:
            with self._told_if_slow():
                answer = self._step(*args, **options)
        except Exception as error:
            self.is_exhausted = is_exhaustion(error)
            raise
        outcome = read_outcome(engine, is_boundary=True, loss_scale_before=loss_scale_before, lr=lr)
        outcome = replace(outcome, ns_calls=self.attachment.ns_calls - self._ns_calls_seen)
        self._ns_calls_seen = self.attachment.ns_calls
        now = time.perf_counter()
        measured = Measured(self.step, outcome, self._step_loss(), now - self._last_step_at, tokens=None)
        self._last_step_at = now
        self.step += 1
        previous = self._probes.measure(measured)
        if previous is not None:
            self._keep(previous)
        return answer

    def _step_loss(self) -> Tensor | None:
        """The mean over micro-batches, which shares of it add up to."""
        loss = None if self._loss_sum is None else self._loss_sum / max(1, self._num_unscaled)
        self._loss_sum, self._num_unscaled = None, 0
        return loss


def describe_spec(
    recorder: Recorder, engine: Any, *, name: str, steps: int | None, tags: tuple[str, ...], notes: str
) -> RunSpec:
    """Say in a spec's words what an engine is set up as; what those cannot hold is left at its default.

    Args:
        recorder: the engine's.
        engine: as `deepspeed.initialize` returned it.
        name: the run's.
        steps: how many there are to be; None where only the record will say.
        tags: the run's.
        notes: the run's.
    """
    zero = engine.optimizer
    is_ours = isinstance(recorder.attachment, ZeroMuon)
    has_muon = not isinstance(recorder.attachment, WatchedOptimizer)
    kind = type(zero.optimizer).__name__
    optimizer, unlike = optimizer_settings(zero.param_groups, ns_method=_release().ns_methods[0])
    for sentence in unlike:
        logger.warning("the record cannot hold all of %s", sentence, extra={"action": "groups_differ"})
    said: dict[str, Any] = {
        "name": name,
        "task": ExternalTask(script=sys.argv[0] or None, optimizer=kind, is_open_ended=steps is None),
        "steps": MAX_STEPS if steps is None else steps,
        "tags": tags,
        "notes": notes,
        "implementation": Implementation.MUON_CORE if is_ours else Implementation.DEEPSPEED,
        "step_ordering": _ordering(recorder.attachment, engine.zero_optimization_stage(), has_muon=has_muon),
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": dist.get_world_size(),
        "precision": _precision(engine),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_clipping": float(engine.gradient_clipping() or 0.0),
        "clip_scope": getattr(recorder.attachment, "clip_scope", "update" if has_muon else "gradient"),
        "loss_scale": _loss_scale(engine),
        "optimizer": optimizer,
    }
    while True:
        try:
            return RunSpec.model_validate(said)
        except ValidationError as error:
            found = error.errors()[0]
            holder, path = _place(said, found["loc"])
            if not path or path[0] in ("name", "tags", "notes", "steps"):
                raise
            # The record shows a default there: whoever reads it must be able to learn that it is none of the engine's.
            logger.warning(
                "the record cannot hold %s=%r and shows its default: %s",
                ".".join(path), holder[path[-1]], found["msg"],
                extra={"action": "field_not_recorded"},
            )  # fmt: skip
            del holder[path[-1]]


def _place(said: dict[str, Any], loc: Sequence[int | str]) -> tuple[dict[str, Any], list[str]]:
    """Find what is refused at `loc`: the innermost object that holds it by its name, and the names that lead there."""
    holder, path = said, list[str]()
    for name in loc:
        inner = holder[path[-1]] if path else said
        if not isinstance(inner, dict) or name not in inner:
            break
        holder = inner
        path.append(str(name))
    return holder, path


def _routes(engine: Any, attachment: Attachment) -> list[ParameterFact]:
    return our_routes(attachment.routed) if isinstance(attachment, ZeroMuon) else native_routes(engine)


def _ordering(attachment: Attachment, stage: int, *, has_muon: bool) -> StepOrdering:
    if isinstance(attachment, ZeroMuon):
        return StepOrdering(attachment.step_ordering)
    # Adam's moments move in its own step, which DeepSpeed calls after its overflow check.
    return _release().orderings[stage] if has_muon else StepOrdering.ORDERED


def _release() -> Release:
    return RELEASES.get(str(deepspeed.__version__).split("+")[0], RELEASES[DEFAULT_DEEPSPEED])


def _precision(engine: Any) -> Precision:
    return _PRECISIONS.get(next(iter(engine.module.parameters())).dtype, Precision.FP32)


def _loss_scale(engine: Any) -> LossScale:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if _precision(engine) is not Precision.FP16 or scaler is None:
        return LossScale()
    if not getattr(engine.optimizer, "dynamic_loss_scale", False):
        return LossScale(static=float(engine.optimizer.loss_scale))
    power = float(engine.optimizer.loss_scale)
    return LossScale(
        initial_power=max(0, min(32, round(power).bit_length() - 1)),
        window=max(1, int(getattr(scaler, "scale_window", 1000))),
        hysteresis=max(1, int(getattr(scaler, "delayed_shift", 2))),
        minimum=max(1, int(getattr(scaler, "min_scale", 1))),
    )
