"""Errors keep their fields when they cross a process, and say what to do."""

import pickle

import pytest
from torch import nn

from muon_core import build_optimizer
from muon_core.errors import CheckpointMismatch, LossScaleExhausted, NotAttached, UnsupportedSetup


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedSetup("a reason", "a remedy"),
        NotAttached("not yet", "attach"),
        LossScaleExhausted(1.0),
        CheckpointMismatch("p", "r"),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_messages_hold_the_reason_and_the_remedy() -> None:
    assert str(UnsupportedSetup("stage 0 has no partitions", "use stage 1")) == "stage 0 has no partitions; use stage 1"
    assert "minimum loss scale 1" in str(LossScaleExhausted(1.0))


def test_stepping_before_attach_says_what_is_missing() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2))

    with pytest.raises(NotAttached, match="ZeRO stage 0"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_ordering": "sooner"}, "step_ordering='sooner' is unknown"),
        ({"clip_scope": "weights"}, "clip_scope='weights' is unknown"),
        ({"adam": {"beta1": 0.9}}, r"unknown settings \['beta1'\]"),
        ({"adam": {"lr": -1}}, "lr=-1"),
        ({"ns_method": "qr"}, "ns_method='qr'"),
        ({"bucket_elements": 0}, "bucket_elements=0"),
        ({"momentum": 1.5}, "momentum=1.5"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(nn.Linear(2, 2), **settings)  # type: ignore[arg-type]


def test_each_route_has_its_own_rate_and_decay() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), lr=0.5, weight_decay=0.1, adam={"lr": 0.25})

    assert [(group["route"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ("muon", 0.5, 0.1),
        ("adamw", 0.25, 0.1),
    ]
