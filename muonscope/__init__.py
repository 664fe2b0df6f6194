"""See, measure and get rid of Muon step-ordering corruption under DeepSpeed.

The names below are imported when first used, so that `import muonscope` and the command's help stay quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muonscope.client import AsyncClient, Client, Experiment, Run, Step
    from muonscope.contract.run_spec import RunSpec
    from muonscope.contract.status import RunStatus, StepOrdering, Verdict
    from muonscope.errors import MuonscopeError
    from muonscope.recording import record

__all__ = [
    "AsyncClient",
    "Client",
    "Experiment",
    "MuonscopeError",
    "Run",
    "RunSpec",
    "RunStatus",
    "Step",
    "StepOrdering",
    "Verdict",
    "record",
]

_HOMES = {
    **dict.fromkeys(("AsyncClient", "Client", "Experiment", "Run", "Step"), "muonscope.client"),
    "RunSpec": "muonscope.contract.run_spec",
    **dict.fromkeys(("RunStatus", "StepOrdering", "Verdict"), "muonscope.contract.status"),
    "MuonscopeError": "muonscope.errors",
    "record": "muonscope.recording",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
