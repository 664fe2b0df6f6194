"""What a task is: a model, its data and its loss. Built-in ones and a user's `module:function` alike.

A task's function gets a `TaskContext` and returns a `Task`:

    def my_task(context: TaskContext) -> Task:
        torch.manual_seed(context.seed)          # already done, with the same seed on every rank
        return MyTask(model=..., ...)

The order of a micro-batch is `loss = task.loss(engine, task.batch(step, micro_batch))`: data are a pure function of
(seed, rank, step, micro-batch), so that two runs of a pair see the same bytes, and a resumed run the rest of them.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from muonscope.contract.run_spec import RunSpec, UserTask
from muonscope.contract.status import FailureKind
from workers.errors import TaskUnusable
from workers.failure import classify, is_peer_lost

Batch: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Where and for what a task is built."""

    seed: int
    rank: int
    world_size: int
    micro_batch_size: int
    dtype: torch.dtype
    """What floating-point inputs must be given as: the model's dtype under DeepSpeed."""
    options: dict[str, Any] = field(default_factory=dict)
    """A user task's own options, as its spec gives them."""
    gradient_accumulation_steps: int = 1
    """Micro-batches a step."""


class Task(Protocol):
    """A model with its data and its loss."""

    model: nn.Module
    """Built on the CPU in fp32, from the context's seed: equal on every rank."""

    def batch(self, step: int, micro_batch: int) -> Batch:
        """Return this rank's micro-batch, on the CPU; the same arguments give the same bytes, always."""
        ...

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the scalar loss of one micro-batch; `model` is the DeepSpeed engine around `self.model`."""
        ...


def tokens_in(task: Task, batch: Batch) -> int | None:
    """Return how many tokens a batch holds, for a task that counts them."""
    count = getattr(task, "tokens", None)
    return None if count is None else int(count(batch))


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Turn what a task's own code raises before the first step into the error that says so: it would only come again.

    What is the machine's keeps its kind: memory that ran out, a full disk, a lost peer.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, TaskUnusable) or classify(error) is not FailureKind.TASK_ERROR or is_peer_lost(error):
            raise
        raise TaskUnusable(f"{what} raised {type(error).__name__}: {error}") from error


def build_task(spec: RunSpec, context: TaskContext) -> Task:
    """Build the task that `spec` names.

    Raises:
        TaskUnusable: a user's task that does not import, raises, or does not return what a task returns.
    """
    if isinstance(spec.task, UserTask):
        return _build_user_task(spec.task, context)
    module = importlib.import_module(f"workers.tasks.{spec.task.name}")
    return cast(Task, module.build(spec.task, context))


def _build_user_task(task: UserTask, context: TaskContext) -> Task:
    module_name, function_name = task.name.split(":")
    with own_errors(f"task {task.name!r} cannot be built: importing {module_name}"):
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            lacks = error.name if isinstance(error, ModuleNotFoundError) else None
            is_other = lacks is not None and not f"{module_name}.".startswith(f"{lacks}.")
            remedy = (
                f"install {lacks} on every node, or put it beside the task's module"
                if is_other
                else "submit it by `ray job submit --working-dir`, or put its module where the PYTHONPATH of the "
                "service's Ray leads"
            )
            raise TaskUnusable(f"task {task.name!r} cannot be imported: {error}; {remedy}") from error
    with own_errors(f"task {task.name!r} cannot be built: {function_name}()"):
        built = function(context)
    missing = [name for name in ("model", "batch", "loss") if not hasattr(built, name)]
    if missing or not isinstance(built.model, nn.Module):
        what = f"lacks {', '.join(missing)}" if missing else f"has a model of type {type(built.model).__name__}"
        raise TaskUnusable(f"task {task.name!r} returned {type(built).__name__}, which {what}; see workers.tasks.Task")
    return cast(Task, built)
