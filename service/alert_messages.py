"""What an alert's message says: the JSON that the receiver of a webhook is sent."""

import json
from typing import Any, Final

from service.store.models import Alert, Run

_MAX_WHY: Final = 2000


def message(uid: str, rule: Alert, run: Run | None, *, what: str, why: str, at: str) -> str:
    """Write a message's JSON."""
    document: dict[str, Any] = {
        "id": uid,
        "type": what,
        "timestamp": at,
        "data": {
            "alert": {"id": rule.uid, "name": rule.name, "kind": str(rule.kind)},
            "run": None if run is None else _about(run),
            "why": why[:_MAX_WHY],
        },
    }
    return json.dumps(document, ensure_ascii=True, allow_nan=False)


def _about(run: Run) -> dict[str, Any]:
    return {
        "id": run.uid,
        "name": run.name,
        "status": str(run.status),
        "verdict": None if run.verdict is None else str(run.verdict),
        "failure_kind": None if run.failure_kind is None else str(run.failure_kind),
        "submitted_by": run.submitted_by,
    }
