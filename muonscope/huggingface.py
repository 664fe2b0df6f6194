"""`muonscope.record` for Hugging Face's Trainer, as one of its callbacks; transformers itself is imported by whoever
has it.

    trainer = Trainer(model, arguments, …)                      # arguments.deepspeed is set
    trainer.add_callback(record_callback(trainer, name="mine"))
    trainer.train()

With Accelerate alone no callback is needed: under DeepSpeed, `accelerator.prepare` returns the engine as the model.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with muonscope.record(model, name="mine"):
        …
"""

import functools
from collections.abc import Callable
from typing import Any

from muonscope.errors import RecordingFailed
from muonscope.recording import RecordedLoop, record


def record_callback(trainer: Any, *, name: str, **options: Any) -> Any:
    """Make a callback that records a Trainer's DeepSpeed engine from the first step of `train()` to its last.

    Args:
        trainer: it is asked for its engine when training begins. Its `train` is stood in for, to see what ends it: no
            event of a callback tells of an error.
        name: the run's.
        options: further ones of `muonscope.record`.
    Returns:
        A `transformers.TrainerCallback`; its `run_id` names the run once training has begun.
    """
    from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]

    # Trainer calls every event of a callback: the base class has those that are nothing to us.
    callback = type("RecordCallback", (_RecordEvents, TrainerCallback), {})(trainer, name, options)
    trainer.train = callback.watch(trainer.train)
    return callback


class _RecordEvents:
    """The events that a record begins and ends with."""

    def __init__(self, trainer: Any, name: str, options: dict[str, Any]) -> None:
        self._trainer, self._name, self._options = trainer, name, options
        self._loop: RecordedLoop | None = None
        self._is_open = False

    @property
    def run_id(self) -> str | None:
        """The run's id, once training has begun."""
        return None if self._loop is None else self._loop.run_id

    def watch(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Have an error that ends `train` end the record as well: a loss scale at its end is the verdict."""

        @functools.wraps(train)
        def watched(*args: Any, **options: Any) -> Any:
            try:
                return train(*args, **options)
            except BaseException as error:
                self._end(error)
                raise

        return watched

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the record: the engine is there by now."""
        engine = self._trainer.model_wrapped
        if not hasattr(engine, "is_gradient_accumulation_boundary"):
            raise RecordingFailed(
                f"the Trainer trains a {type(engine).__name__}, which is no DeepSpeed engine",
                remedy="set TrainingArguments(deepspeed=…), or leave the callback out",
            )
        # Without an end in between: `auto_find_batch_size` has given up the batch size that was recorded.
        self._end(RecordingFailed("the Trainer began anew, with another batch size"))
        # Of a resumed training those are left; of one that was at its end already, none, which no spec can say.
        left = int(state.max_steps or 0) - int(state.global_step)
        self._loop = record(engine, **{"name": self._name, "steps": left if left > 0 else None, **self._options})
        self._loop.__enter__()
        self._is_open = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the record. A script that is killed before is found by the shipper: its record says that no word came."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._loop is not None and self._is_open:
            self._is_open = False
            self._loop.__exit__(None if error is None else type(error), error, None)
