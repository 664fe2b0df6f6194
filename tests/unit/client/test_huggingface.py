"""What a Trainer's callback asks `muonscope.record` for; the real Trainer's tests are the integration tests."""

from types import SimpleNamespace
from typing import Any

import pytest

from muonscope import huggingface


@pytest.mark.parametrize(
    ("max_steps", "global_step", "steps"), [(12, 0, 12), (12, 5, 7), (12, 12, None), (-1, 0, None)]
)
def test_the_steps_that_are_left_are_said_and_none_where_there_are_none(
    max_steps: int, global_step: int, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Loop:
        def __enter__(self) -> None:
            """Nothing is recorded."""

    def record(engine: Any, **options: Any) -> Loop:
        asked.append(options["steps"])
        return Loop()

    monkeypatch.setattr(huggingface, "record", record)
    trainer = SimpleNamespace(model_wrapped=SimpleNamespace(is_gradient_accumulation_boundary=None))
    events = huggingface._RecordEvents(trainer, "mine", {})

    events.on_train_begin(None, SimpleNamespace(max_steps=max_steps, global_step=global_step), None)

    assert asked == [steps]
