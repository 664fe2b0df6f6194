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

import sys
from typing import Any

from muonscope.errors import RecordingFailed
from muonscope.recording import RecordedLoop, record


def record_callback(trainer: Any, *, name: str, **options: Any) -> Any:
    """Make a callback that records a Trainer's DeepSpeed engine from the first step of `train()` to its last.

    Args:
        trainer: it is asked for its engine when training begins.
        name: the run's.
        options: further ones of `muonscope.record`.
    Returns:
        A `transformers.TrainerCallback`.
    """
    from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]

    # Trainer calls every event of a callback: the base class has those that are nothing to us.
    return type("RecordCallback", (_RecordEvents, TrainerCallback), {})(trainer, name, options)


class _RecordEvents:
    """The events that a record begins and ends with."""

    def __init__(self, trainer: Any, name: str, options: dict[str, Any]) -> None:
        self._trainer, self._name, self._options = trainer, name, options
        self._loop: RecordedLoop | None = None

    @property
    def run_id(self) -> str | None:
        """The run's id, on rank 0 once training has begun."""
        return None if self._loop is None else self._loop.run_id

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the record: the engine is there by now."""
        engine = self._trainer.model_wrapped
        if not hasattr(engine, "is_gradient_accumulation_boundary"):
            raise RecordingFailed(
                f"the Trainer trains a {type(engine).__name__}, which is no DeepSpeed engine",
                remedy="set TrainingArguments(deepspeed=…), or leave the callback out",
            )
        steps = int(state.max_steps) if state.max_steps and state.max_steps > 0 else None
        self._loop = record(engine, **{"name": self._name, "steps": steps, **self._options})
        self._loop.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the record. A script that raises before is found by the shipper: its record says that no word came."""
        if self._loop is not None:
            self._loop.__exit__(*sys.exc_info())
