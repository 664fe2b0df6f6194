"""What muon_core raises beyond `ValueError` for a bad argument.

    MuonCoreError
    ├── UnsupportedSetup      a DeepSpeed set-up that would train something else than was asked
    │   └── NotAttached       the optimizer stepped, or was asked about an engine, before `attach`
    ├── LossScaleExhausted    an overflow at the smallest loss scale: the run cannot go on
    └── CheckpointMismatch    a consolidated checkpoint that this model and routing cannot resume from

Overflow itself is an outcome of a step (`muon_core.zero.precision.StepOutcome`), never an error.
"""


class MuonCoreError(Exception):
    """Base of every error here; survives pickling because its fields are its arguments."""


class UnsupportedSetup(MuonCoreError):
    """A set-up that is refused before training, with the reason and what to do instead."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class NotAttached(UnsupportedSetup):
    """An engine or optimizer that `attach` (or `deepspeed_native.install`) has not seen.

    DeepSpeed steps an optimizer inside `initialize` in the set-ups that have no ZeRO partitions: refused here as well.
    """


class LossScaleExhausted(MuonCoreError):
    """A gradient overflowed at the smallest loss scale; DeepSpeed raises a bare Exception here."""

    def __init__(self, loss_scale: float) -> None:
        super().__init__(loss_scale)
        self.loss_scale = loss_scale

    def __str__(self) -> str:
        return (
            f"the gradient overflowed at the minimum loss scale {self.loss_scale:g}; "
            "no smaller scale is allowed, so no further step can be applied"
        )


class CheckpointMismatch(MuonCoreError):
    """A folder that holds no consolidated checkpoint, or one of another model or routing."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot resume from {self.path}: {self.reason}"
